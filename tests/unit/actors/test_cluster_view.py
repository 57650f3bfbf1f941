"""What the REST API gathers from a tracker and replicas, over real xoscar pools."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from typing import Any

import pytest
import xoscar as xo
from pool_process import PoolProcess

from xinference_xavier.actors.registry import ReplicaEntry, ShareEntry
from xinference_xavier.actors.replica import REPLICA_UID, ReplicaActor
from xinference_xavier.actors.tracker import HeartbeatReply, get_or_create_tracker
from xinference_xavier.host.view import REPLICA_SECONDS, ClusterView, KnownModel, ModelView

# xoscar caches client connections for the life of a loop and leaves them to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


def entry(uid: str, replica: int, address: str | None, stats: dict | None = None) -> ReplicaEntry:
    return ReplicaEntry(
        model_uid=uid,
        replica=replica,
        state="starting" if address is None else "running",
        address=address,
        pid=1,
        started=1.0,
        options={},
        stats=stats,
        share=None,
    )


def answers() -> dict[str, Any]:
    """A replica's statistics, run in the replica's process."""
    return {"from": "replica"}


async def look(
    supervisor: str,
    entries: list[ReplicaEntry],
    running: dict[str, set[int]],
    uid: str | None = None,
) -> list[ModelView]:
    async def known_models() -> dict[str, KnownModel]:
        return {uid: KnownModel(None, frozenset(replicas)) for uid, replicas in running.items()}

    tracker = await get_or_create_tracker(supervisor)
    for each in entries:
        await tracker.heartbeat(each)
    return await ClusterView(supervisor, known_models).models(uid)


def test_a_supervisor_without_a_free_thread_answers_a_large_cluster() -> None:
    """xoscar would make such answers in the thread pool, which ``PoolProcess`` keeps busy."""
    members = [f"member {number}" for number in range(40)]
    entries = [
        {
            **entry("a", number, f"127.0.0.1:{2000 + number}", {"counters": {"requests": number}}),
            "share": ShareEntry(
                member=member, scope="s", problem=None, namespace={}, machine="this one"
            ),
        }
        for number, member in enumerate(members)
    ]
    pool = PoolProcess(tracker=True)

    async def beat() -> tuple[list[dict[str, Any]], HeartbeatReply]:
        tracker = await get_or_create_tracker(pool.address)
        for each in entries[:-1]:
            await xo.wait_for(tracker.heartbeat(each), 5)
        reply = await xo.wait_for(tracker.heartbeat(entries[-1]), 5)
        return pickle.loads(await xo.wait_for(tracker.replicas(), 5)), pickle.loads(reply)

    try:
        known, reply = asyncio.run(beat())
    finally:
        pool.kill()
    assert [each["replica"] for each in known] == list(range(40))
    assert [peer["member"] for peer in reply["peers"]] == members[:-1]


async def open_replica(address: str) -> None:
    await xo.create_actor(ReplicaActor, answers, uid=REPLICA_UID, address=address)


def states(models: list[ModelView]) -> dict[str, list[tuple[int, str, bool, Any]]]:
    return {
        m.model_uid: [(r.replica, r.state, r.stale, r.stats) for r in m.replicas] for m in models
    }


def test_replicas_are_asked_and_silent_ones_shown_by_their_last_words(
    supervisor: PoolProcess,
) -> None:
    replica = PoolProcess()

    async def run() -> list[ModelView]:
        await open_replica(replica.address)
        entries = [
            entry("a", 0, replica.address, {"from": "heartbeat"}),
            entry("a", 1, "127.0.0.1:9", {"from": "heartbeat"}),
            entry("a", 2, "127.0.0.1:9", {"from": "heartbeat"}),
            entry("b", 0, None),
            entry("c", 0, "127.0.0.1:9", {"from": "heartbeat"}),
        ]
        return await look(supervisor.address, entries, running={"a": {0, 1}, "b": set()})

    try:
        found = states(asyncio.run(run()))
    finally:
        replica.kill()
    assert found == {
        "a": [
            (0, "running", False, {"from": "replica"}),
            (1, "running", True, {"from": "heartbeat"}),
        ],
        "b": [(0, "starting", False, None)],
        # Neither a's third replica nor c answers or is running: they were terminated.
    }


def test_stopped_replica_costs_one_time_out_only(supervisor: PoolProcess) -> None:
    replica = PoolProcess()

    async def run() -> tuple[list[ModelView], float]:
        await open_replica(replica.address)
        os.kill(replica.process.pid or 0, signal.SIGSTOP)
        entries = [entry("a", n, replica.address, {"from": "heartbeat"}) for n in range(4)]
        began = time.monotonic()
        return await look(supervisor.address, entries, {"a": set()}, "a"), time.monotonic() - began

    try:
        found, seconds = asyncio.run(run())
    finally:
        os.kill(replica.process.pid or 0, signal.SIGCONT)
        replica.kill()
    assert [r.stale for r in found[0].replicas] == [True] * 4
    assert seconds < 3 * REPLICA_SECONDS


def test_no_tracker_means_no_models() -> None:
    async def nothing_runs() -> dict[str, KnownModel]:
        return {}

    plain = PoolProcess(tracker=False)
    try:
        assert asyncio.run(ClusterView(plain.address, nothing_runs).models()) == []
    finally:
        plain.kill()


def test_supervisor_that_restarted_is_asked_again(supervisor: PoolProcess) -> None:
    async def nothing_runs() -> dict[str, KnownModel]:
        return {}

    async def run() -> tuple[int, int, int]:
        view = ClusterView(supervisor.address, nothing_runs)
        tracker = await get_or_create_tracker(supervisor.address)
        await tracker.heartbeat(entry("a", 0, None))
        before = len(await view.models())
        await asyncio.to_thread(supervisor.kill)
        with pytest.raises((ConnectionError, xo.ServerClosed, OSError)):
            await view.models()
        await asyncio.to_thread(supervisor.start)
        empty = len(await view.models())
        tracker = await get_or_create_tracker(supervisor.address)
        await tracker.heartbeat(entry("a", 0, None))
        return before, empty, len(await view.models())

    assert asyncio.run(run()) == (1, 0, 1)
