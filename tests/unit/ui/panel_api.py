"""Xinference's real API object with our panel on it, and who may ask it.

Making one takes seconds, so that a module's tests share it, and ``forget`` in between.

There is no supervisor behind it: the sampler finds nobody, and tests give it samples.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import xoscar as xo
from xinference.api import restful_api, routers

from xinference_xavier.actors.replica import REPLICA_UID, ReplicaActor
from xinference_xavier.host import api as our_api
from xinference_xavier.host.admin import Admin, Place
from xinference_xavier.host.history import Sample
from xinference_xavier.host.view import ModelView

#: Users by name, and their scopes.
USERS = {"admin": ["admin"], "reader": ["models:list"], "other": ["cache:list"]}


class Engine:
    """The engine's side of a replica, which ``tests/engine`` has the tests of: notes what it is
    asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def clear(self) -> dict[str, int]:
        self.asked.append(("clear",))
        return {"removed_now": 40, "removed_later": 2}

    async def resize(self, gpu: int | None, cpu: int | None, wait: float) -> dict[str, Any]:
        self.asked.append(("resize", gpu, cpu))
        tier = {"budget_bytes": 2**21, "rows": 32, "rows_leaving": 3, "state": "draining"}
        return {"gpu": tier, "cpu": tier}

    async def lookup(self, tokens: list[int], cache_salt: str | None) -> dict[str, int]:
        self.asked.append(("lookup", len(tokens)))
        found = {"engine": 10, "gpu": 30, "cpu": 0, "peer": 20, "prefix": 60}
        return {**found, "not_cached": len(tokens) - 60}

    async def pause_stores(self, paused: bool) -> dict[str, bool]:
        self.asked.append(("pause", paused))
        return {"paused": paused}


@dataclass
class PanelApi:
    """One API instance. ``tokens``: those of the users above by name, and of an API key."""

    api: Any
    #: Replica 0 of model ``m``, on an actor of its own at ``address``.
    engine: Engine = field(default_factory=Engine)
    address: str = ""
    places: list[Place] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)

    def client(self, who: str | None = None, **headers: str) -> httpx.AsyncClient:
        """As ``who`` with a Bearer header, or without a credential."""
        if who is not None:
            headers["Authorization"] = f"Bearer {self.tokens[who]}"
        transport = httpx.ASGITransport(self.api._app, raise_app_exceptions=False)
        return httpx.AsyncClient(
            transport=transport, base_url="http://api", headers=headers, timeout=60
        )

    def show(self, *models: ModelView) -> None:
        """Let the sampler have heard this just now."""
        sampler = self.api._app.state.xavier_sampler
        sampler._keep(Sample(time.time(), time.monotonic(), list(models)))

    def forget(self) -> None:
        """What tests leave behind: requests for changes, models, failed credentials, bans."""
        self.engine.asked.clear()
        self.places = [(0, self.address)]
        sampler = self.api._app.state.xavier_sampler
        sampler.latest = None
        sampler.events.clear()
        sampler._pasts.clear()
        if self.api._auth_service is not None:
            self.api._auth_service._rate_limiter.unban_all_ips()

    def make_admin(self, *_: Any) -> Admin:
        """The real one; who runs and what a prompt's tokens are is known here."""

        async def places(model_uid: str) -> list[Place]:
            return self.places if model_uid == "m" else []

        async def known_models() -> dict[str, None]:
            return {"m": None}

        async def tokenize(model_uid: str, prompt: Any) -> list[int]:
            return [0] * 100

        return Admin(places, known_models, tokenize)

    @property
    def failures(self) -> int:
        """Credentials that the host has counted as failures."""
        records = self.api._auth_service._rate_limiter._ip_records
        return sum(len(record.timestamps) for record in records.values())


def _settings(folder: Path, monkeypatch: pytest.MonkeyPatch, auth: bool) -> None:
    for name in (
        "XINFERENCE_AUTH_DB_PATH",
        "XINFERENCE_LAUNCH_HISTORY_DB_PATH",
        "XINFERENCE_MONITOR_CONFIG_DB_PATH",
        "XINFERENCE_SYSTEM_SETTINGS_PATH",
    ):
        monkeypatch.setattr(restful_api, name, str(folder / name))
    # One per process, bound to its first path.
    monkeypatch.setattr("xinference.core.system_settings_store._store", None)
    monkeypatch.setattr(restful_api, "is_metrics_disabled", lambda: True)
    monkeypatch.setenv("XINFERENCE_AUTH_JWT_SECRET_KEY", "k" * 48)
    monkeypatch.setenv("XINFERENCE_AUTH_ENCRYPTION_KEY", "YWFh" * 10 + "YWE=")
    monkeypatch.setenv("XINFERENCE_AUTH_ADVANCED", "1" if auth else "0")


@contextlib.asynccontextmanager
async def panel_api(
    folder: Path, monkeypatch: pytest.MonkeyPatch, auth: bool
) -> AsyncIterator[PanelApi]:
    """An API whose application runs until the block ends."""
    _settings(folder, monkeypatch, auth)
    api: Any = restful_api.RESTfulAPI("127.0.0.1:9", "127.0.0.1", 0)
    made = PanelApi(api)
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0)
    made.address = pool.external_address
    made.places = [(0, made.address)]
    actor = (dict, lambda: None, made.engine)
    await xo.create_actor(ReplicaActor, *actor, uid=REPLICA_UID, address=made.address)
    monkeypatch.setattr(our_api, "Admin", made.make_admin)
    api._app.state.api = api
    api._app.state.advanced_auth = api._advanced_auth_service
    our_api.on_routers(routers)
    routers.register_all_routes(api)
    if auth:
        from xinference.api.oauth2.advanced.routes import register_advanced_auth_routes

        register_advanced_auth_routes(api)
    api._app.include_router(api._router)
    sampler = api._app.state.xavier_sampler
    # Nobody answers here: what tests show is all that it knows.
    sampler.interval_seconds = 60.0
    async with api._app.router.lifespan_context(api._app):
        if auth:
            _make_users(made)
        yield made
    await pool.stop()
    # xoscar leaves client connections to the collector: not to that of another test.
    gc.collect()


def _make_users(made: PanelApi) -> None:
    """Users and an API key, by the host's own service: logging in takes a second each."""
    service = made.api._auth_service
    for name, scopes in USERS.items():
        uid = service.db.create_user(username=name, password_hash="-", permissions=scopes)
        made.users[name] = uid
        made.tokens[name] = service.create_access_token(uid, name, scopes)
    key = service.create_api_key_for_user(made.users["admin"], "key")
    made.tokens["key"] = key["key"]
