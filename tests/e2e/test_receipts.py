"""Where prompt tokens came from, in the responses of a real Xinference; read by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conversation import fill_engine, text
from server import Xinference

HEADER = "x-xavier-prompt-tokens"
TOKENS = 1000
BLOCK = 32
WHOLE_BLOCKS = TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def client(server: Xinference) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        yield made


def receipt(usage: Any) -> dict[str, int]:
    """Of OpenAI's ``CompletionUsage`` or a dictionary; adds up to the prompt."""
    found = usage if isinstance(usage, dict) else usage.model_dump()
    details = found["prompt_tokens_details"]
    tokens: dict[str, int] = details["xavier"]
    assert list(tokens) == ["engine", "gpu", "cpu", "peer", "computed"]
    assert sum(tokens.values()) == found["prompt_tokens"]
    assert details["cached_tokens"] == found["prompt_tokens"] - tokens["computed"]
    return tokens


def in_header(headers: httpx.Headers) -> dict[str, int]:
    pairs = (part.partition("=") for part in headers[HEADER].split(", "))
    return {source: int(tokens) for source, _, tokens in pairs}


def test_completions_say_computed_then_engine_then_tier(
    server: Xinference, cached_model: str
) -> None:
    prompt = text(100, TOKENS)
    answers = [server.complete(cached_model, prompt, max_tokens=4) for _ in range(2)]
    fill_engine(server, cached_model)
    answers.append(server.complete(cached_model, prompt, max_tokens=4))
    for answer in answers:
        answer.raise_for_status()
        assert in_header(answer.headers) == receipt(answer.json()["usage"])
    first, second, third = (in_header(answer.headers) for answer in answers)
    assert first["computed"] == TOKENS
    assert second["engine"] == WHOLE_BLOCKS
    assert third["engine"] + third["gpu"] + third["cpu"] == WHOLE_BLOCKS
    assert third["gpu"] + third["cpu"] > 0
    shown = server.stats(cached_model)["requests"][-1]
    assert {source: shown[source] for source in third} == third


def test_chat_says_the_same_streamed_or_not(client: openai.OpenAI, cached_model: str) -> None:
    messages: Any = [{"role": "user", "content": text(101, TOKENS)}]
    call = client.chat.completions
    raw = call.with_raw_response.create(
        model=cached_model, messages=messages, max_tokens=4, temperature=0
    )
    answer = raw.parse()
    assert answer.usage is not None
    assert receipt(answer.usage) == in_header(raw.headers)
    # Other chats have the beginning of the chat template in common, and no more.
    assert in_header(raw.headers)["computed"] >= TOKENS

    options: Any = {"include_usage": True}
    chunks = list(
        call.create(
            model=cached_model, messages=messages, max_tokens=4, stream=True, stream_options=options
        )
    )
    assert chunks[-1].choices == []
    assert receipt(chunks[-1].usage)["engine"] == answer.usage.prompt_tokens // BLOCK * BLOCK


@pytest.mark.slow
def test_completions_streamed(client: openai.OpenAI, cached_model: str) -> None:
    options: Any = {"include_usage": True}
    with client.completions.with_streaming_response.create(
        model=cached_model,
        prompt=text(102, TOKENS),
        max_tokens=4,
        stream=True,
        stream_options=options,
    ) as response:
        assert HEADER not in response.headers
        chunks = list(response.parse())
    assert receipt(chunks[-1].usage)["computed"] == TOKENS


@pytest.mark.slow
def test_a_stop_string_ends_a_request_with_its_receipt(
    server: Xinference, cached_model: str
) -> None:
    """The model process sees it, not the engine."""
    prompt = text(103, TOKENS)
    whole = server.complete(cached_model, prompt, max_tokens=12).json()["choices"][0]["text"]
    answer = server.complete(cached_model, prompt, max_tokens=12, stop=[whole[4:6]])
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["text"]) <= 4
    assert receipt(answer.json()["usage"])["engine"] == WHOLE_BLOCKS


@pytest.mark.slow
def test_other_endpoints_say_how_much_was_cached(server: Xinference, cached_model: str) -> None:
    message = {"role": "user", "content": text(104, TOKENS)}
    body = {"model": cached_model, "messages": [message], "max_tokens": 4}
    version = {"anthropic-version": "2023-06-01"}
    usage = [
        server.client.post("/v1/messages", json=body, headers=version).json()["usage"]
        for _ in range(2)
    ]
    # At most what the chat template puts in front of every message.
    assert usage[0].get("cache_read_input_tokens", 0) <= 4 * BLOCK
    assert usage[1]["cache_read_input_tokens"] >= WHOLE_BLOCKS

    asked = {"model": cached_model, "input": text(104, TOKENS), "max_output_tokens": 4}
    answer = server.client.post("/v1/responses", json=asked)
    answer.raise_for_status()
    assert answer.json()["usage"]["input_tokens_details"]["cached_tokens"] >= WHOLE_BLOCKS


@pytest.mark.slow
def test_switched_off_no_response_tells(server: Xinference, tiny_model: Path) -> None:
    budgets = ("--xavier-gpu-budget", "16MiB", "--xavier-cpu-budget", "16MiB")
    launched = server.launch(
        "silent", tiny_model, "--enable-xavier-gpu", *budgets, "--xavier-receipts", "false"
    )
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("silent")
    prompt = text(105, TOKENS)
    for _ in range(2):
        answer = server.complete("silent", prompt, max_tokens=4)
        answer.raise_for_status()
        assert HEADER not in answer.headers
        assert set(answer.json()["usage"]) == {
            "prompt_tokens",
            "completion_tokens",
            "total_tokens",
        }
    options = {"include_usage": True}
    streamed = server.complete("silent", prompt, max_tokens=4, stream=True, stream_options=options)
    assert '"usage"' in streamed.text
    assert "prompt_tokens_details" not in streamed.text
    assert server.stats("silent")["counters"]["tokens_engine"] > 0
    server.terminate("silent")
