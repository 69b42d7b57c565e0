"""Chat templates for the tiny model, which has 256 tokens of one byte each: they only name the tools.

What tells of their format stands in a comment.
"""

from __future__ import annotations

from typing import Any

_TALK = (
    "{% for t in tools %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
HERMES = "{# <tool_call> #}" + _TALK
LLAMA = '{# ipython "parameters": #}' + _TALK
MISTRAL = "{# [TOOL_CALLS] #}" + _TALK
MISTRAL_NAMES = "{# [TOOL_CALLS] [ARGS] #}" + _TALK
THINKS = "{# <think> #}" + HERMES
BEGINS_THINKING = HERMES.replace("a:{% endif %}", "a:<think>\n{% endif %}")

GET: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {
                "c": {"type": "string", "maxLength": 3},
                "n": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["c", "n"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
