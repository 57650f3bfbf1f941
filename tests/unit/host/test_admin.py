"""Steering over real actors: every replica is asked, and every one's answer or silence is told."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import xoscar as xo
from fastapi import APIRouter, FastAPI

from xinference_xavier.actors.replica import REPLICA_UID, ReplicaActor
from xinference_xavier.config import refusal
from xinference_xavier.host import admin as admin_module
from xinference_xavier.host.admin import Admin, AdminError, Place
from xinference_xavier.host.admin_routes import add_admin_routes
from xinference_xavier.types import OptionError

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

TIER = {"budget_bytes": 64, "rows": 4, "rows_leaving": 0, "state": "done", "note": None}


@pytest.fixture(autouse=True)
def _collect_connections() -> Iterator[None]:
    """xoscar leaves client connections to the collector: not to that of another test."""
    yield
    gc.collect()


class Engine:
    """The engine's side, whose own tests are in ``tests/engine``."""

    def __init__(self) -> None:
        self.paused = False

    async def clear(self) -> dict[str, int]:
        return {"removed_now": 3, "removed_later": 1}

    async def resize(self, gpu: int | None, cpu: int | None, wait: float) -> dict[str, Any]:
        if gpu == 1:
            raise refusal("xavier_gpu_budget", 1, "is below one row", "Give at least 16")
        return {"gpu": {**TIER, "budget_bytes": gpu or 64}, "cpu": TIER}

    async def lookup(self, tokens: list[int], cache_salt: str | None) -> dict[str, int]:
        cached = 0 if cache_salt else 2
        found = {"engine": 0, "gpu": cached, "cpu": 0, "peer": 0, "prefix": cached}
        return {**found, "not_cached": len(tokens) - cached}

    async def pause_stores(self, paused: bool) -> dict[str, bool]:
        self.paused = paused
        return {"paused": paused}


async def _tokens(model_uid: str, prompt: Any) -> list[int]:
    if not isinstance(prompt, str):
        raise ValueError("the model is not a chat model and takes a text only")
    return [ord(letter) for letter in prompt]


def with_replicas(work: Callable[[Admin], Awaitable[Any]], *others: Place, engines: int = 1) -> Any:
    """Run ``work`` beside replicas 0, 1 ... that answer, and ``others`` of model ``m``."""

    async def run() -> Any:
        pools = [await xo.create_actor_pool("127.0.0.1:0", n_process=0) for _ in range(engines)]
        places: list[Place] = []
        for number, pool in enumerate(pools):
            arguments = (dict, lambda: None, Engine())
            at = pool.external_address
            await xo.create_actor(ReplicaActor, *arguments, uid=REPLICA_UID, address=at)
            places.append((number, at))

        async def found(model_uid: str) -> list[Place]:
            return [*places, *others] if model_uid == "m" else []

        async def known() -> dict[str, None]:
            return {"m": None, "plain": None}

        try:
            return await work(Admin(found, known, _tokens))
        finally:
            for pool in pools:
                await pool.stop()

    return asyncio.run(run())


def test_every_replica_does_what_is_asked() -> None:
    async def work(admin: Admin) -> list[Any]:
        return [
            await admin.clear("m"),
            await admin.resize("m", "1KiB"),
            await admin.lookup("m", "abc"),
            await admin.lookup("m", "abc", cache_salt="s"),
            await admin.pause_stores("m", True),
        ]

    cleared, resized, found, salted, paused = with_replicas(work, engines=2)
    assert [(r.replica, r.removed_now, r.removed_later) for r in cleared.replicas] == [
        (0, 3, 1),
        (1, 3, 1),
    ]
    assert [r.gpu.budget_bytes for r in resized.replicas] == [1024, 1024]
    assert (found.tokens, [r.gpu for r in found.replicas]) == (3, [2, 2])
    assert [r.not_cached for r in salted.replicas] == [3, 3]
    assert [r.paused for r in paused.replicas] == [True, True]


def test_replicas_that_do_not_answer_are_named_beside_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_module, "CALL_SECONDS", 2.0)
    view = with_replicas(lambda admin: admin.clear("m"), (1, None), (2, "127.0.0.1:9"))
    assert [r.problem is None for r in view.replicas] == [True, False, False]
    assert "Replica 1 is still starting" in view.replicas[1].problem
    assert "Replica 2 did not answer" in view.replicas[2].problem
    assert view.replicas[2].removed_now is None


def test_a_replica_that_refuses_says_why() -> None:
    view = with_replicas(lambda admin: admin.resize("m", 1))
    assert view.replicas[0].problem == "xavier_gpu_budget=1 is below one row. Give at least 16"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a: a.clear("x"), LookupError, "no model 'x'"),
        (lambda a: a.clear("plain"), AdminError, "enable_xavier_gpu=true"),
        (lambda a: a.lookup("plain", "text"), AdminError, "No replica of 'plain'"),
        (lambda a: a.lookup("m", ""), OptionError, "is empty"),
        (lambda a: a.lookup("m", [{"role": "user"}]), OptionError, "not a chat model"),
        (lambda a: a.resize("m"), OptionError, "Neither"),
        (lambda a: a.resize("m", "4 furlongs"), OptionError, "xavier_gpu_budget='4 furlongs'"),
        (lambda a: a.resize("m", 0, 0), OptionError, "leave no tier"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_replica_is(
    call: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        with_replicas(call)


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "words"),
    [
        ("POST", "m/clear", None, 200, "removed_later"),
        ("PATCH", "m/budgets", {"xavier_gpu_budget": 1}, 409, "below one row"),
        ("PATCH", "m/budgets", {"xavier_gpu_budget": "1KiB"}, 200, "1024"),
        ("POST", "m/stores", {"paused": False}, 200, "false"),
        ("POST", "x/clear", None, 404, "no model 'x'"),
        ("POST", "plain/stores", {"paused": True}, 409, "No replica of 'plain'"),
        ("POST", "m/lookup", {"messages": [{"role": "user"}]}, 400, "not a chat model"),
        ("POST", "m/lookup", {"prompt": "abc"}, 200, "not_cached"),
    ],
)
def test_routes_answer_in_sentences(
    method: str, path: str, body: Any, code: int, words: str
) -> None:
    async def work(admin: Admin) -> httpx.Response:
        app, router = FastAPI(), APIRouter()
        add_admin_routes(router, admin, list)
        app.include_router(router)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            return await http.request(method, f"/v1/xavier/{path}", json=body)

    answer = with_replicas(work)
    assert answer.status_code == code, answer.text
    assert words in answer.text


def test_a_supervisor_that_is_gone_is_503() -> None:
    async def gone(*_: Any) -> Any:
        raise ConnectionError("refused")

    async def run() -> httpx.Response:
        app, router = FastAPI(), APIRouter()
        add_admin_routes(router, Admin(gone, gone, _tokens), list)
        app.include_router(router)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            return await http.post("/v1/xavier/m/clear")

    answer = asyncio.run(run())
    assert answer.status_code == 503
    assert "supervisor does not answer (ConnectionError)" in answer.json()["detail"]
