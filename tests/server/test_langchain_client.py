"""`langchain-openai` from PyPI, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.client_environments import client_python
from tests.support.live_server import LiveServer, serve
from tests.support.tiny_llm import TEMPLATE, write_tiny_llm

PROGRAM = """
import asyncio, json, sys
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

url = sys.argv[1] + "/v1"
known = dict(base_url=url, api_key="none", model="tiny", max_retries=0, timeout=20)
chat = ChatOpenAI(**known, temperature=0.7, max_tokens=12, seed=4, stream_usage=True)
messages = [SystemMessage("be brief"), HumanMessage("hello")]
whole = chat.invoke(messages)
chunks = list(chat.stream(messages))
total = chunks[0]
for chunk in chunks[1:]:
    total += chunk
batch = chat.batch([messages] * 4)

async def main():
    one = await chat.ainvoke(messages)
    parts = [chunk.content async for chunk in chat.astream(messages)]
    return [one.content, "".join(parts)]

likely = chat.bind(logprobs=True, top_logprobs=2).invoke(messages).response_metadata["logprobs"]["content"]
several = chat.generate([messages], n=3)
llm = OpenAI(**known, temperature=0.7, max_tokens=12, seed=4)
parameters = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
calling = chat.bind_tools([tool], tool_choice="f", parallel_tool_calls=False).bind(max_tokens=120)
called = calling.invoke(messages)
pieces = list(calling.stream(messages))
gathered = pieces[0]
for piece in pieces[1:]:
    gathered += piece
longer = [*messages, called, ToolMessage("9", tool_call_id=called.tool_calls[0]["id"])]
followed = chat.invoke(longer)
closed = {**parameters, "title": "n", "additionalProperties": False}
structured = chat.with_structured_output(closed, method="json_schema").bind(max_tokens=190)
print(json.dumps({
    "whole": whole.content, "usage": whole.usage_metadata, "finish": whole.response_metadata["finish_reason"],
    "stream": total.content, "stream_usage": total.usage_metadata, "chunks": len(chunks),
    "batch": [one.content for one in batch], "async": asyncio.run(main()), "likely": len(likely),
    "several": len(several.generations[0]), "llm": llm.invoke("hello"), "llm_stream": "".join(llm.stream("hello")),
    "llm_batch": llm.batch(["hello", "hello"]), "calls": called.tool_calls, "stream_calls": gathered.tool_calls,
    "followed": followed.content, "structured": structured.invoke(messages),
}))
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    template = "{# tools <tool_call> #}" + TEMPLATE  # takes tools, and tells the model nothing of them
    with serve(write_tiny_llm(tmp_path_factory.mktemp("tiny"), template=template)) as server:
        yield server


def test_langchain_works_unchanged(live: LiveServer) -> None:
    python = client_python("langchain", "langchain-openai>=1,<2")
    ran = subprocess.run([python, "-c", PROGRAM, live.url], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["whole"]
    assert [said["stream"], *said["batch"], *said["async"]] == [said["whole"]] * 7
    assert said["chunks"] > 2
    counts = {"input_tokens": said["usage"]["input_tokens"], "output_tokens": 12}
    for usage in (said["usage"], said["stream_usage"]):
        assert usage["total_tokens"] == usage["input_tokens"] + 12
        assert counts.items() <= usage.items()
    assert said["usage"]["input_tokens"] == len("system: be brief\nuser: hello\nassistant: ")
    assert said["stream_usage"]["input_token_details"]["cache_read"] > 0  # the same prompt as the one before
    assert (said["finish"], said["likely"], said["several"]) == ("length", 12, 3)
    assert [said["llm_stream"], *said["llm_batch"]] == [said["llm"]] * 3
    (call,) = said["calls"]
    assert call["name"] == "f"
    assert 0 <= call["args"]["a"] <= 9
    assert said["stream_calls"] == said["calls"]
    assert said["followed"]
    assert 0 <= said["structured"]["a"] <= 9
