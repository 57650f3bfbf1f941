"""Bridge and tracker over real xoscar pools; the supervisor's pool is another process."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xoscar as xo
from pool_process import PoolProcess

from xinference_xavier.actors.bridge import Bridge
from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.actors.tracker import find_tracker, get_or_create_tracker

# xoscar caches client connections for the life of a loop and leaves them to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

IDENTITY = {"model_uid": "m", "replica": 3, "options": {"xavier_gpu_budget": 1}}


class Beats:
    """A statistics callable that says when it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self._called = threading.Condition()

    def __call__(self) -> dict[str, Any]:
        with self._called:
            self.calls += 1
            self._called.notify_all()
        return {"calls": self.calls}

    def wait_for(self, more: int) -> None:
        """Wait until ``more`` further calls were made."""
        with self._called:
            target = self.calls + more
            assert self._called.wait_for(lambda: self.calls >= target, 20)


@pytest.fixture
def beats() -> Beats:
    return Beats()


@pytest.fixture
def open_bridge(beats: Beats) -> Iterator[Callable[..., Bridge]]:
    bridges: list[Bridge] = []

    def start(tracker_address: str | None) -> Bridge:
        bridge = Bridge(IDENTITY, "127.0.0.1", tracker_address, beats, heartbeat_seconds=0.05)
        bridges.append(bridge)
        bridge.start()
        return bridge

    yield start
    for bridge in bridges:
        bridge.close()


def wait_for_log(caplog: pytest.LogCaptureFixture, words: str) -> None:
    deadline = time.monotonic() + 20
    while words not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


async def replicas(address: str) -> list[dict[str, Any]]:
    tracker = await find_tracker(address)
    return [] if tracker is None else pickle.loads(await tracker.replicas())


def test_replica_registers_answers_and_says_goodbye(
    supervisor: PoolProcess, beats: Beats, open_bridge: Callable[..., Bridge]
) -> None:
    bridge = open_bridge(supervisor.address)
    beats.wait_for(3)

    async def look() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        found = await replicas(supervisor.address)
        replica = await xo.actor_ref(uid=REPLICA_UID, address=found[0]["address"])
        return found, await replica.stats()

    found, stats = asyncio.run(look())
    assert [(e["model_uid"], e["replica"], e["state"]) for e in found] == [("m", 3, "running")]
    assert found[0]["address"] == bridge.address
    assert found[0]["pid"] == os.getpid()
    assert found[0]["options"] == {"xavier_gpu_budget": 1}
    assert stats["calls"] > found[0]["stats"]["calls"]

    bridge.close()
    bridge.close()
    assert asyncio.run(replicas(supervisor.address)) == []


def test_replica_registers_again_after_the_supervisor_was_killed(
    supervisor: PoolProcess,
    beats: Beats,
    open_bridge: Callable[..., Bridge],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "xinference_xavier")
    open_bridge(supervisor.address)
    beats.wait_for(2)
    supervisor.kill()
    time.sleep(0.5)  # several beats fail meanwhile; they leave no trace to wait for
    supervisor.start()
    beats.wait_for(5)
    assert [e["replica"] for e in asyncio.run(replicas(supervisor.address))] == [3]
    failures = [r for r in caplog.records if "No heartbeat" in r.message]
    assert len(failures) == 1
    assert supervisor.address in failures[0].message


def test_destroyed_tracker_is_made_again(
    supervisor: PoolProcess, beats: Beats, open_bridge: Callable[..., Bridge]
) -> None:
    open_bridge(supervisor.address)
    beats.wait_for(2)

    async def destroy() -> None:
        await xo.destroy_actor(await find_tracker(supervisor.address))

    asyncio.run(destroy())
    beats.wait_for(5)
    assert [e["replica"] for e in asyncio.run(replicas(supervisor.address))] == [3]


def test_destroyed_replica_is_made_again(
    supervisor: PoolProcess,
    beats: Beats,
    open_bridge: Callable[..., Bridge],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bridge = open_bridge(supervisor.address)
    beats.wait_for(2)

    async def destroy_and_ask() -> dict[str, Any]:
        replica = await xo.actor_ref(uid=REPLICA_UID, address=bridge.address)
        await xo.destroy_actor(replica)
        await asyncio.to_thread(wait_for_log, caplog, "is made again")
        answer: dict[str, Any] = await replica.stats()
        return answer

    assert asyncio.run(destroy_and_ask())["calls"] > 2
    beats.wait_for(5)
    assert caplog.text.count("is made again") == 1
    assert len(asyncio.run(replicas(supervisor.address))) == 1


def test_supervisor_without_a_tracker_gets_none(
    beats: Beats, open_bridge: Callable[..., Bridge], caplog: pytest.LogCaptureFixture
) -> None:
    """Its host may lack this package, which must not be noticed there."""
    plain = PoolProcess(tracker=False)
    try:
        bridge = open_bridge(plain.address)
        wait_for_log(caplog, "xinference-xavier is not installed there")
        assert asyncio.run(find_tracker(plain.address)) is None
        bridge.close()
    finally:
        plain.kill()
    assert caplog.text.count("No heartbeat") == 1


def test_racing_creators_share_one_tracker(supervisor: PoolProcess) -> None:
    async def race() -> list[Any]:
        found = await asyncio.gather(*(get_or_create_tracker(supervisor.address) for _ in range(8)))
        for number, tracker in enumerate(found):
            await tracker.heartbeat(
                {
                    "model_uid": "m",
                    "replica": number,
                    "state": "starting",
                    "address": None,
                    "pid": 1,
                    "started": 1.0,
                    "options": {},
                    "stats": None,
                    "share": None,
                }
            )
        return await replicas(supervisor.address)

    assert len(asyncio.run(race())) == 8


def test_close_is_quick_while_the_supervisor_is_stopped(
    supervisor: PoolProcess, beats: Beats, open_bridge: Callable[..., Bridge]
) -> None:
    bridge = open_bridge(supervisor.address)
    beats.wait_for(2)
    os.kill(supervisor.process.pid or 0, signal.SIGSTOP)
    try:
        began = time.monotonic()
        bridge.close()
        assert time.monotonic() - began < 1.5
        bridge._thread.join(20)
        assert not bridge._thread.is_alive()
    finally:
        os.kill(supervisor.process.pid or 0, signal.SIGCONT)


def test_start_and_close_never_wait_for_a_pool(beats: Beats) -> None:
    unstarted = Bridge(IDENTITY, "127.0.0.1", None, beats)
    unstarted.close()
    hasty = Bridge(IDENTITY, "127.0.0.1", None, beats)
    hasty.start()
    hasty.close()
    assert not any(t.name == "xavier-bridge" and t.is_alive() for t in threading.enumerate())


def test_unusable_interface_is_logged_and_harmless(
    beats: Beats, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = Bridge(IDENTITY, "203.0.113.1", None, beats)
    bridge.start()
    bridge._thread.join(20)
    assert bridge.address is None
    assert "actor pool on 203.0.113.1 failed" in caplog.text
    bridge.close()


def test_failing_statistics_keep_the_replica_listed(
    supervisor: PoolProcess, caplog: pytest.LogCaptureFixture
) -> None:
    calls = threading.Semaphore(0)

    def broken() -> dict[str, Any]:
        calls.release()
        raise RuntimeError("no statistics today")

    bridge = Bridge(IDENTITY, "127.0.0.1", supervisor.address, broken, heartbeat_seconds=0.05)
    bridge.start()
    for _ in range(3):
        assert calls.acquire(timeout=20)
    found = asyncio.run(replicas(supervisor.address))
    bridge.close()
    assert [e["stats"] for e in found] == [None]
    assert caplog.text.count("Reading this replica's statistics failed") == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_bridge_leaves_a_pinned_core(supervisor: PoolProcess) -> None:
    everywhere = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    read = threading.Event()

    def stats() -> dict[str, Any]:
        seen.append(os.sched_getaffinity(0))
        read.set()
        return {}

    os.sched_setaffinity(0, {min(everywhere)})
    try:
        bridge = Bridge(IDENTITY, "127.0.0.1", supervisor.address, stats)
        bridge.start()
        assert read.wait(20)
        bridge.close()
    finally:
        os.sched_setaffinity(0, everywhere)
    assert seen[0] >= everywhere
