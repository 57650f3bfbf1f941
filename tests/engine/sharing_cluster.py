"""Replicas of the harness that share: a real tracker, real actors, real NIXL, one process.

Each replica's bridge and each rank's tier actor have threads, loops and pools of their own; only
the scheduler and the ranks are stepped by the test.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import xoscar as xo
from checks import check_step
from harness import Asked, MakeReplica, Replica
from shapes import Shape
from xoscar.backends import pool as pool_module
from xoscar.backends.router import Router

from xinference_xavier.actors.loops import run_and_leave
from xinference_xavier.actors.sharing import Sharing
from xinference_xavier.actors.tracker import get_or_create_tracker

WAIT_SECONDS = 20.0


def talk_through_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let actors of one process call each other as if they were in several.

    xoscar runs a call to an actor of the same process on the caller's own loop: then no call could
    be lost, and none would fail once the pool has stopped.
    """
    threads: dict[str, int] = {}
    inside = Router.get_internal_address

    def get_internal_address(self: Router, address: str) -> str | None:
        if threads.get(address) != threading.get_ident():
            return None
        return inside(self, address)

    def note_pool(address: str, pool: Any) -> None:
        threads[address] = threading.get_ident()

    monkeypatch.setattr(pool_module, "register_local_pool", note_pool)
    monkeypatch.setattr(Router, "get_internal_address", get_internal_address)


def until(happened: Callable[[], Any], what: str = "") -> None:
    """Wait for another thread to bring something about."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


class TrackerPool:
    """The supervisor's pool, on a thread of its own."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:0"
        self.start()

    def start(self, tracker: bool = True) -> None:
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: run_and_leave(self._serve(tracker)))
        self._thread.start()
        assert self._up.wait(WAIT_SECONDS)

    async def _serve(self, tracker: bool) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        pool = await xo.create_actor_pool(
            self.address, n_process=0, enable_internal_addresses=[False]
        )
        self.address = pool.external_address
        if tracker:
            await get_or_create_tracker(self.address)
        self._up.set()
        await self._stop.wait()
        await pool.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_SECONDS)


class Cluster:
    """Makes replicas that share, and waits for what travels between them."""

    def __init__(self, make: MakeReplica, tracker: TrackerPool) -> None:
        self._make = make
        self.tracker = tracker
        self.replicas: list[Replica] = []

    def add(self, shape: Shape) -> Replica:
        return self.add_as(shape, len(self.replicas))

    def add_as(self, shape: Shape, number: int) -> Replica:
        """A replica of that number; an older one of the same number has to yield its place."""
        own = replace(shape, replica=number, tracker=self.tracker.address)
        made = self._make(own)
        self.replicas.append(made)
        until(lambda: sharing_of(made) is not None, "the bridge to share")
        return made

    def pair(self, shape: Shape) -> tuple[Replica, Replica]:
        """Two replicas that know each other."""
        first, second = self.add(shape), self.add(shape)
        self.acquaint()
        return first, second

    def acquaint(self) -> None:
        for each in self.replicas:
            until(lambda each=each: len(usable(each)) == len(self.replicas) - 1, "peers to meet")

    def settle(self) -> None:
        """Until every replica knows what the others hold."""
        for owner in self.replicas:
            held = set(owner.manager.keys())
            for other in self.replicas:
                if other is not owner:
                    until(lambda o=other, w=owner, h=held: mirrors(o, w, h), "mirrors to follow")


def sharing_of(replica: Replica) -> Sharing:
    sharing: Any = replica.connector._bridge.sharing
    return sharing


def member_of(replica: Replica) -> str:
    return sharing_of(replica)._setup.entry["member"]


def usable(replica: Replica) -> Sequence[str]:
    peers = sharing_of(replica).peers
    return tuple(peers.usable) if peers is not None else ()


def mirrors(reader: Replica, owner: Replica, keys: set[bytes]) -> bool:
    """Whether ``reader`` knows exactly ``keys`` of ``owner``."""
    mirror, member = sharing_of(reader).mirror, member_of(owner)
    known = mirror._visible.get(member)
    return (
        known is not None
        and len(known.keys) == len(keys)
        and all(mirror.holds(member, key) for key in keys)
    )


def ask(replica: Replica, tokens: Sequence[int], count: int = 1) -> Asked:
    """Answer a request, stepping while actors work."""
    asked = replica.asked[replica.ask(tokens, count)]
    finish(replica)
    return asked


def finish(replica: Replica) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while replica.busy or replica.manager.planner.fetches.flying:
        assert time.monotonic() < deadline, f"never ends: {replica.scheduler.requests}"
        replica.step()
        time.sleep(0.001)
    check_step(replica)
