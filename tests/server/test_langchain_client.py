"""`langchain-openai` from PyPI, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.client_environments import client_python
from tests.support.live_server import LiveServer, serve
from tests.support.tiny_llm import write_tiny_llm

PROGRAM = """
import asyncio, json, sys
from langchain_core.messages import HumanMessage, SystemMessage
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
try:
    chat.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(messages)
    error = None
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
print(json.dumps({
    "whole": whole.content, "usage": whole.usage_metadata, "finish": whole.response_metadata["finish_reason"],
    "stream": total.content, "stream_usage": total.usage_metadata, "chunks": len(chunks),
    "batch": [one.content for one in batch], "async": asyncio.run(main()), "likely": len(likely),
    "several": len(several.generations[0]), "llm": llm.invoke("hello"), "llm_stream": "".join(llm.stream("hello")),
    "llm_batch": llm.batch(["hello", "hello"]), "error": error,
}))
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(write_tiny_llm(tmp_path_factory.mktemp("tiny"))) as server:
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
    assert "tools is not supported" in said["error"]
