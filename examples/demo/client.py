"""Requests to a launched model: one streamed completion, and what the cache counted for it.

Covers: the time to the first token as a client sees it, and the counters of
``GET /v1/xavier/{model_uid}``. ``read_cache`` is the only place that knows the names in that
answer. Runs in the demonstration's process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

import httpx

#: The cache counts a request when it starts to compute, before its first token: no need to wait
#: longer than a slow answer of the replica.
COUNTED_SECONDS = 10.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Answer:
    """What one request brought. ``error`` is None when it succeeded."""

    text: str = ""
    ttft_seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Counters:
    """Monotonic counters of all replicas: tokens by source, blocks by tier."""

    requests: int
    tokens_prompt: int
    tokens_gpu: int
    tokens_cpu: int
    tokens_peer: int
    tokens_engine: int
    tokens_computed: int
    hits_gpu_blocks: int
    hits_cpu_blocks: int
    hits_peer_blocks: int
    misses_blocks: int
    demotions: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Counters))
        )


@dataclass(frozen=True)
class CacheState:
    """One reading of the cache: what it counted so far, and what it holds now."""

    counters: Counters
    gpu_snapshots: int
    cpu_snapshots: int
    fetches: int
    fetch_failures: int
    #: Requests that each replica has counted, by its number.
    requests: tuple[int, ...]
    #: Replicas that each one can read from.
    peers: tuple[int, ...]

    def answered_by(self, earlier: CacheState) -> int | None:
        """The replica that has counted a request since ``earlier``."""
        pairs = zip(self.requests, earlier.requests, strict=True)
        return next((number for number, (now, then) in enumerate(pairs) if now > then), None)


class Client:
    """One model of one server."""

    def __init__(self, url: str, model_uid: str, max_tokens: int, replicas: int = 1) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)
        self._model_uid = model_uid
        self._max_tokens = max_tokens
        self._replicas = replicas

    def close(self) -> None:
        self._http.close()

    def is_loaded(self) -> bool:
        """True once the model answers: Xinference calls it ready before its engine has loaded.

        Raises ``LookupError`` when there is no such model any more: loading it failed.
        """
        try:
            answer = self._http.post("/v1/completions", json=self._body("a", max_tokens=1))
        except httpx.TransportError:
            return False
        if "Model not found" in answer.text:
            raise LookupError(f"the model {self._model_uid} could not be loaded")
        return answer.status_code == 200

    def complete(self, prompt: str) -> Answer:
        """Send one prompt, greedy; failures are in the answer and never raised."""
        started = time.perf_counter()
        ttft_seconds, pieces = 0.0, []
        try:
            for piece in self._stream(prompt):
                ttft_seconds = ttft_seconds or time.perf_counter() - started
                pieces.append(piece)
        except (httpx.HTTPError, ValueError) as error:
            return Answer(error=f"{type(error).__name__}: {error}")
        if not pieces:
            return Answer(error="the stream held no text")
        return Answer("".join(pieces), ttft_seconds)

    def read_cache(self) -> CacheState:
        """Counters and snapshots of the model's replicas.

        Raises ``LookupError`` when the model has no cache, or a replica has not reported yet.
        """
        answer = self._http.get(f"/v1/xavier/{self._model_uid}")
        if answer.status_code != 200:
            raise LookupError(f"GET /v1/xavier/{self._model_uid}: {answer.status_code}")
        replicas = [replica["stats"] for replica in answer.json()["replicas"]]
        if len(replicas) < self._replicas or not all(replicas):
            raise LookupError(f"not all replicas of {self._model_uid} report a cache yet")
        counters = [
            Counters(*(stats["counters"][f.name] for f in fields(Counters))) for stats in replicas
        ]
        sharing = [stats["sharing"] for stats in replicas]
        return CacheState(
            Counters(*(sum(getattr(c, f.name) for c in counters) for f in fields(Counters))),
            gpu_snapshots=sum(stats["tiers"]["gpu"]["snapshots"] for stats in replicas),
            cpu_snapshots=sum(stats["tiers"]["cpu"]["snapshots"] for stats in replicas),
            fetches=sum(each["fetches"] for each in sharing),
            fetch_failures=sum(sum(each["fetch_failures"].values()) for each in sharing),
            requests=tuple(c.requests for c in counters),
            peers=tuple(each["peers"] for each in sharing),
        )

    def has_cache(self) -> bool:
        """True once every replica reports to the API and can read from all others."""
        try:
            state = self.read_cache()
        except (LookupError, httpx.TransportError):
            return False
        return all(peers == self._replicas - 1 for peers in state.peers)

    def read_cache_after(self, requests: int) -> CacheState:
        """The cache once it has counted ``requests`` requests in all."""
        deadline = time.monotonic() + COUNTED_SECONDS
        state = self.read_cache()
        while state.counters.requests < requests and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            state = self.read_cache()
        return state

    def _stream(self, prompt: str) -> Iterator[str]:
        """Pieces of text as they arrive."""
        body = self._body(prompt, max_tokens=self._max_tokens, stream=True)
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise ValueError(f"status {answer.status_code}: {answer.text[:300]}")
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(str(event["error"])[:300])
                for choice in event.get("choices", []):
                    if choice.get("text"):
                        yield choice["text"]

    def _body(self, prompt: str, **more: object) -> dict[str, object]:
        return {"model": self._model_uid, "prompt": prompt, "temperature": 0, **more}
