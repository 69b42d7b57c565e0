"""Fields of OpenAI's routes beside each other, as evaluation harnesses and vLLM's clients use them."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.params import SamplingParams
from tests.support.live_server import LiveServer
from tests.support.served import served
from tests.support.sse import read_openai
from tests.support.tiny_llm import write_tiny_llm

HI = [{"role": "user", "content": "hi"}]


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("logprobs", [0, 1, 5])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_echo_with_logprobs_scores_prompt_and_output_in_one_list(http: httpx.Client, most: int, logprobs: int) -> None:
    prompts = [[76, 77, 80], [9, 8]]
    body = complete(http, prompt=prompts, echo=True, logprobs=logprobs, max_tokens=most, temperature=0, ignore_eos=True)
    for choice, ids in zip(body["choices"], prompts):
        found = choice["logprobs"]
        count = len(ids) + most
        assert [len(found[name]) for name in found] == [count] * 4
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert all(value < 0 for value in found["token_logprobs"][1:])
        # Broken characters look the same, and are one key of the object.
        assert all(1 <= len(top) <= logprobs + 1 for top in found["top_logprobs"][1:])
        assert choice["text"].startswith("".join(found["tokens"][: len(ids)]))
        assert found["text_offset"][: len(ids) + 1] == list(range(min(count, len(ids) + 1)))
    assert body["usage"]["completion_tokens"] == most * 2
    assert body["usage"]["prompt_tokens"] == 5


def test_the_score_of_an_echoed_text_is_that_of_its_generation(http: httpx.Client) -> None:
    made = complete(http, prompt="hello", logprobs=0, max_tokens=6, temperature=0, return_token_ids=True)["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    scored = complete(http, prompt=ids, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert scored["logprobs"]["token_logprobs"][5:] == made["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("prompt", ["hi", ["hi", "you"], [76, 77], [[76, 77], [80]]])
@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_in_the_order_of_prompts_and_then_of_n(http: httpx.Client, prompt: Any, stream: bool) -> None:
    asked = {"max_tokens": 5, "seed": 1, "return_token_ids": True, "echo": True}
    prompts = prompt if isinstance(prompt[0], (list, str)) and not isinstance(prompt, str) else [prompt]
    alone = [complete(http, prompt=each, n=3, **asked)["choices"] for each in prompts]
    expected = [choice for choices in alone for choice in choices]
    if stream:
        response = http.post("/v1/completions", json={"prompt": prompt, "n": 3, "stream": True, **asked})
        read = read_openai(response.content, chat=False, choices=len(expected))
        assert read.texts == [choice["text"] for choice in expected]
        assert [read.choices[i].token_ids for i in range(len(expected))] == [each["token_ids"] for each in expected]
        told = {
            c["index"]: c["prompt_token_ids"]
            for chunk in read.chunks
            for c in chunk["choices"]
            if "prompt_token_ids" in c
        }
        assert [told[i] for i in range(len(expected))] == [each["prompt_token_ids"] for each in expected]
    else:
        found = complete(http, prompt=prompt, n=3, **asked)["choices"]
        assert [each["index"] for each in found] == list(range(len(expected)))
        assert [each["text"] for each in found] == [each["text"] for each in expected]


@pytest.mark.parametrize("include", [True, False, None])
@pytest.mark.parametrize("continuous", [True, False, None])
def test_usage_in_a_stream_is_what_was_asked_for(
    http: httpx.Client, include: bool | None, continuous: bool | None
) -> None:
    options = {"include_usage": include, "continuous_usage_stats": continuous}
    body = {"messages": HI, "max_tokens": 4, "ignore_eos": True, "stream": True, "n": 2, "stream_options": options}
    streamed = read_openai(
        http.post("/v1/chat/completions", json=body).content, chat=True, choices=2, usage=bool(include)
    )
    told = [chunk["usage"] for chunk in streamed.chunks if chunk.get("usage") is not None]
    if not include:
        assert told == []  # the steady numbers are part of the usage that was asked for
        assert all("usage" not in chunk for chunk in streamed.chunks)
        return
    assert len(told) == (len(streamed.chunks) if continuous else 1)
    assert told[-1]["completion_tokens"] == 8
    assert told[-1]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_every_field_of_the_sampling_parameters_comes_to_the_engine(live: LiveServer, http: httpx.Client) -> None:
    """Under its own name, in both routes; those that a route spells in its own way are checked elsewhere."""
    given = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "typical_p": 0.95,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop": ["zz"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 3,
        "min_tokens": 1,
        "prompt_logprobs": 1,
        "prompt_logprobs_start": 1,
        "logit_bias": {5: 1.0},
        "allowed_token_ids": [5, 6, 7, 8],
        "bad_words": ["q"],
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 9,
        "priority": -3,
        "cache_salt": "pepper",
    }
    assert set(given) | {"logprobs", "structured", "shown_special_ids"} == set(SamplingParams.__dataclass_fields__)
    seen: list[SamplingParams] = []
    engine = live.state.engine
    submit = engine.submit
    engine.submit = lambda number, ids, params, **rest: (seen.append(params), submit(number, ids, params, **rest))[1]  # type: ignore[method-assign]
    try:
        for route, body in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": HI})):
            response = http.post(
                route, json={**body, **{k: v if k != "logit_bias" else {"5": 1.0} for k, v in given.items()}}
            )
            assert response.status_code == 200, response.text
            got = seen.pop()
            # The prompt is cut before the engine sees it, so that what is answered tells the cut one.
            assert {name: getattr(got, name) for name in given if name != "truncate_prompt_tokens"} == {
                name: value for name, value in given.items() if name != "truncate_prompt_tokens"
            }
            assert response.json()["usage"]["prompt_tokens"] == min(9, response.json()["usage"]["prompt_tokens"])
    finally:
        engine.submit = submit  # type: ignore[method-assign]


@pytest.mark.parametrize(("policy", "order"), [("priority", [1, 2, 0]), ("fcfs", [0, 1, 2])])
def test_a_lower_priority_is_served_first_where_the_server_goes_by_it(
    tmp_path: Path, policy: str, order: list[int]
) -> None:
    flags = ("--policy", policy, "--max-num-seqs", "1")
    ends: list[int] = []
    with served(write_tiny_llm(tmp_path / "tiny"), *flags, faults={"step_seconds": 0.05}) as server:

        def ask(i: int, priority: int) -> None:
            server.ask("/v1/completions", {"prompt": "hi", "max_tokens": 1, "priority": priority})
            ends.append(i)

        first = server.connect()  # runs as long as it is wanted, so that the others wait
        body = {"prompt": "hi", "max_tokens": 240, "ignore_eos": True, "priority": -9, "stream": True}
        first.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        running = first.getresponse()
        assert running.readline().startswith(b"data: ")
        threads = [threading.Thread(target=ask, args=each) for each in enumerate((7, -2, 3))]
        for i, thread in enumerate(threads, 1):
            thread.start()
            while b"octavo_num_requests_waiting %d.0" % i not in server.ask("/metrics").body:
                assert thread.is_alive()
                time.sleep(0.01)
        running.close()
        first.close()
        for thread in threads:
            thread.join()
    assert ends == order


@pytest.mark.parametrize("name", ["tgi", "dummy", "", None, "tiny"])
def test_the_names_that_clients_send_for_any_model_are_taken(http: httpx.Client, name: str | None) -> None:
    assert complete(http, prompt="hi", max_tokens=1, model=name)["model"] == "tiny"


def test_every_answer_tells_the_seed_that_makes_it_again(http: httpx.Client) -> None:
    for stream, chat in itertools.product((False, True), repeat=2):
        route, body = ("/v1/chat/completions", {"messages": HI}) if chat else ("/v1/completions", {"prompt": "hi"})
        body = {**body, "max_tokens": 8, "n": 2, "ignore_eos": True}
        response = http.post(route, json={**body, "stream": stream})
        if stream:
            read = read_openai(response.content, chat=chat, choices=2)
            seeds, texts = {choice.seed for choice in read.choices.values()}, read.texts
        else:
            seeds = {choice["seed"] for choice in response.json()["choices"]}
            texts = [c["message"]["content"] if chat else c["text"] for c in response.json()["choices"]]
        (seed,) = seeds
        again = http.post(route, json={**body, "seed": seed}).json()["choices"]
        assert [c["message"]["content"] if chat else c["text"] for c in again] == texts
