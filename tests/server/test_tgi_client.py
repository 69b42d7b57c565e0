"""TGI's own client, `text_generation` 0.7.0, in an environment of its own: it needs an old huggingface-hub."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.client_environments import client_python
from tests.support.live_server import LiveServer

PROGRAM = """
import asyncio, json, sys
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

url = sys.argv[1]
client = Client(url, timeout=20)
asked = dict(max_new_tokens=12, do_sample=True, seed=4)
whole = client.generate("hello", decoder_input_details=True, top_n_tokens=2, **asked)
text, last = "", None
for response in client.generate_stream("hello", **asked):
    if not response.token.special:
        text += response.token.text
    last = response
best = client.generate("hello", do_sample=True, best_of=2, max_new_tokens=4)
chat = client.chat([{"role": "user", "content": "hi"}], max_tokens=5, seed=1)
try:
    client.generate("hello", max_new_tokens=-1)
    error = None
except ValidationError as raised:
    error = str(raised)

async def main():
    client = AsyncClient(url, timeout=20)
    many = await asyncio.gather(*(client.generate("hello", **asked) for _ in range(4)))
    streamed = "".join([r.token.text async for r in client.generate_stream("hello", **asked) if not r.token.special])
    return [one.generated_text for one in many] + [streamed]

print(json.dumps({
    "whole": whole.generated_text, "stream": text, "last": last.generated_text, "async": asyncio.run(main()),
    "seed": whole.details.seed, "prefill": len(whole.details.prefill), "tokens": len(whole.details.tokens),
    "finish": whole.details.finish_reason.value, "stream_finish": last.details and last.details.finish_reason.value,
    "best_of": len(best.details.best_of_sequences), "chat": chat.choices[0].message["content"]
    if isinstance(chat.choices[0].message, dict) else chat.choices[0].message.content, "error": error,
}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return client_python("text-generation", "text-generation==0.7.0", "huggingface-hub<1")


def test_the_client_of_tgi_works_unchanged(python: Path, live: LiveServer) -> None:
    ran = subprocess.run([python, "-c", PROGRAM, live.url], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["stream"] == said["last"] == said["whole"]
    assert said["async"] == [said["whole"]] * 5
    assert (said["seed"], said["prefill"], said["tokens"], said["finish"]) == (4, 5, 12, "length")
    assert said["best_of"] == 1
    assert said["chat"]
    assert "max_new_tokens" in said["error"]
