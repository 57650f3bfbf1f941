"""Sends a plan and times what comes back, in a process of its own.

``python -m benchmarks.serving.client`` reads ``{"target": ..., "stages": [...]}`` from standard
input and writes one JSON list of records, sorted by name, to standard output. A target is the URL
of one server, or of two that vLLM's NixlConnector joins: the one computes the prompt, and its
answer's ``kv_transfer_params`` let the other one read the KV blocks and decode. That is the
protocol of vLLM's example proxy, without a proxy's hop. Times are seconds of this process's
monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

#: A prompt behind 32 others on two cores waits for minutes.
TIMEOUT_SECONDS = 1800.0
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Target:
    """Where requests go. ``prefill_url`` is None unless two servers share the work."""

    url: str
    model: str
    prefill_url: str | None = None


@dataclass
class Timed:
    """One request: ``chunks`` are the times at which text came, ``tokens`` how much in all."""

    name: str
    group: str
    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


class Sender:
    """One event loop's requests to one target."""

    def __init__(self, http: httpx.AsyncClient, target: Target) -> None:
        self._http = http
        self._target = target
        self.records: list[Timed] = []

    async def run(self, stages: list[dict[str, Any]]) -> None:
        """Send stage after stage; returns when all requests have ended."""
        under_way: list[asyncio.Task[None]] = []
        for stage in stages:
            if stage["background"]:
                under_way += await self._start(stage["requests"])
            elif stage["concurrency"] is None:
                await _all([self._later(request) for request in stage["requests"]])
            else:
                await self._closed_loop(stage["requests"], stage["concurrency"])
        await asyncio.gather(*under_way)

    async def _start(self, requests: list[dict[str, Any]]) -> list[asyncio.Task[None]]:
        """Let streams run; returns when each has said something, or ended."""
        started = [asyncio.Event() for _ in requests]
        tasks = [
            asyncio.create_task(self._converse(request, event))
            for request, event in zip(requests, started, strict=True)
        ]
        await _all([event.wait() for event in started])
        return tasks

    async def _later(self, request: dict[str, Any]) -> None:
        await asyncio.sleep(request["at"])
        await self._converse(request)

    async def _closed_loop(self, requests: list[dict[str, Any]], concurrency: int) -> None:
        waiting = iter(requests)

        async def work() -> None:
            for request in waiting:
                await self._converse(request)

        await _all([work() for _ in range(concurrency)])

    async def _converse(
        self, request: dict[str, Any], started: asyncio.Event | None = None
    ) -> None:
        prompt = request["prompt"]
        for number, turn in enumerate(("", *request["turns"])):
            prompt += turn
            name = f"{request['name']}.{number}" if request["turns"] else request["name"]
            timed = Timed(name, request["group"], time.perf_counter())
            self.records.append(timed)
            try:
                async for piece in self._stream(prompt, request["max_tokens"]):
                    timed.chunks.append(time.perf_counter())
                    timed.tokens += len(piece)
                    prompt += piece
                    if started is not None:
                        started.set()
            except (httpx.HTTPError, ValueError, KeyError) as error:
                timed.error = f"{type(error).__name__}: {error}"
            if started is not None:
                started.set()
            if not timed.chunks and timed.error is None:
                timed.error = "the stream held no text"
            if timed.error is not None:
                return

    async def _stream(self, prompt: str, max_tokens: int) -> Any:
        """Pieces of text as they arrive. Raises ``ValueError`` for an answer that is an error."""
        body: dict[str, Any] = {
            "model": self._target.model,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        headers = {"X-Request-Id": uuid.uuid4().hex}
        if self._target.prefill_url is not None:
            body["kv_transfer_params"] = await self._prefill(body, headers)
        url = f"{self._target.url}/v1/completions"
        streamed = {**body, "stream": True}
        async with self._http.stream("POST", url, json=streamed, headers=headers) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode(errors="replace")
                raise ValueError(f"status {answer.status_code}: {said[:300]}")
            async for line in answer.aiter_lines():
                piece = _piece(line)
                if piece:
                    yield piece

    async def _prefill(self, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """Compute the prompt at the other server; what the decoder needs to read its blocks."""
        asked = {**body, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        url = f"{self._target.prefill_url}/v1/completions"
        answer = await self._http.post(url, json=asked, headers=headers)
        if answer.status_code != 200:
            raise ValueError(f"prefill, status {answer.status_code}: {answer.text[:300]}")
        handed: dict[str, Any] = answer.json()["kv_transfer_params"]
        return handed


def _piece(line: str) -> str:
    """The text of one line of server-sent events."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return ""
    event = json.loads(data)
    if "error" in event:
        raise ValueError(str(event["error"])[:300])
    return "".join(choice.get("text") or "" for choice in event.get("choices", []))


async def _all(calls: list[Awaitable[Any]]) -> None:
    await asyncio.gather(*calls)


async def send(target: Target, stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send ``stages``; one record for each request, errors within them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as http:
        sender = Sender(http, target)
        await sender.run(stages)
    return [asdict(each) for each in sorted(sender.records, key=lambda timed: timed.name)]


def main(run: Callable[..., Any] = asyncio.run) -> int:
    plan = json.load(sys.stdin)
    json.dump(run(send(Target(**plan["target"]), plan["stages"])), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
