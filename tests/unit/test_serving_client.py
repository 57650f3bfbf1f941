"""The serving benchmark's client against an application that answers as vLLM's server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from benchmarks.serving.client import Sender, Target
from benchmarks.serving.workload import Request as Asked
from benchmarks.serving.workload import Stage

ALONE = Target("http://decode", "m")
PAIR = replace(ALONE, prefill_url="http://prefill")


class Served:
    """Answers every prompt with its first letters, and remembers what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.under_way = 0
        self.most = 0
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.complete)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.ids.append(request.headers["x-request-id"])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        if body["prompt"].startswith("refuse"):
            return JSONResponse({"detail": "no"}, status_code=500)
        if not body.get("stream"):
            handed = {"remote_block_ids": [1, 2], "remote_engine_id": "e"}
            return JSONResponse({"kv_transfer_params": handed})
        return StreamingResponse(self._pieces(body), media_type="text/event-stream")

    async def _pieces(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for letter in body["prompt"][: body["max_tokens"]]:
            yield f"data: {json.dumps({'choices': [{'text': letter}]})}\n\n"
        if body["prompt"].startswith("break"):
            yield f"data: {json.dumps({'error': 'the engine is gone'})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def served() -> Served:
    return Served()


async def send(served: Served, target: Target, *stages: Stage) -> dict[str, Any]:
    transport = httpx.ASGITransport(app=served.app)
    async with httpx.AsyncClient(transport=transport) as http:
        sender = Sender(http, target)
        await sender.run([stage.plan() for stage in stages])
    return {record.name: record for record in sender.records}


def ask(name: str, prompt: str, **more: Any) -> Asked:
    return Asked(name, "incoming", prompt, 3, **more)


async def test_a_stream_is_timed_piece_by_piece(served: Served) -> None:
    found = await send(served, ALONE, Stage((ask("a", "hello"),), 1))
    assert found["a"].error is None
    assert found["a"].tokens == 3
    assert found["a"].sent < found["a"].chunks[0] <= found["a"].chunks[2]
    assert "kv_transfer_params" not in served.bodies[0]


async def test_the_pair_computes_at_the_one_and_decodes_at_the_other(served: Served) -> None:
    """The prefill answer's parameters go into the decoder's call, under the same request id."""
    found = await send(served, PAIR, Stage((ask("a", "hello"),), 1))
    prefill, decode = served.bodies
    assert prefill["max_tokens"] == 1
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert decode["max_tokens"] == 3
    assert decode["kv_transfer_params"] == {"remote_block_ids": [1, 2], "remote_engine_id": "e"}
    assert served.ids[0] == served.ids[1]
    assert found["a"].tokens == 3


async def test_turns_repeat_what_was_said(served: Served) -> None:
    talk = ask("talk", "one ", turns=("two ", "three "))
    found = await send(served, ALONE, Stage((talk,), 1))
    assert [body["prompt"] for body in served.bodies] == [
        "one ",
        "one onetwo ",
        "one onetwo onethree ",
    ]
    assert found.keys() == {"talk.0", "talk.1", "talk.2"}


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_are_under_way_than_allowed(served: Served, concurrency: int) -> None:
    requests = tuple(ask(f"r{i}", f"p{i}") for i in range(9))
    found = await send(served, ALONE, Stage(requests, concurrency))
    assert len(found) == 9
    assert served.most == concurrency


async def test_requests_are_sent_when_their_time_has_come(served: Served) -> None:
    requests = tuple(ask(f"r{i}", "p", at=0.05 * i) for i in range(3))
    found = await send(served, ALONE, Stage(requests))
    sent = [found[f"r{i}"].sent for i in range(3)]
    assert 0.04 < sent[1] - sent[0] < 0.5
    assert 0.04 < sent[2] - sent[1] < 0.5


async def test_streams_speak_before_the_next_stage_begins(served: Served) -> None:
    streams = Stage((Asked("s", "stream", "stream", 3),), background=True)
    found = await send(served, ALONE, streams, Stage((ask("a", "hello"),)))
    assert found["s"].chunks[0] < found["a"].sent


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("refuse me", "status 500"), ("break down", "the engine is gone"), ("", "no text")],
)
async def test_what_fails_is_in_the_record_and_ends_nothing(
    served: Served, prompt: str, error: str
) -> None:
    streams = Stage((Asked("s", "stream", prompt, 3),), background=True)
    found = await send(served, ALONE, streams, Stage((ask("a", "hello"),), 1))
    assert error in found["s"].error
    assert found["a"].error is None


async def test_a_prefill_that_fails_fails_its_request(served: Served) -> None:
    found = await send(served, PAIR, Stage((ask("a", "refuse me"),), 1))
    assert found["a"].error.startswith("ValueError: prefill, status 500")
