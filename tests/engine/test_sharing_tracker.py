"""The tracker is lost, comes back, or loses messages: replicas share on, and catch up."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable

import pytest
from faults import LENGTH, answers_again, deaf, failures, on_loop, owner_and_reader, quiet
from shapes import BLOCK, TP2
from sharing_cluster import Cluster, ask, member_of, sharing_of, until, usable
from test_bytes import prompt

from xinference_xavier.actors.registry import ReplicaEntry
from xinference_xavier.actors.tracker import find_tracker
from xinference_xavier.engine.settings import cluster_secret

pytestmark = quiet


@pytest.mark.parametrize("with_tracker", [True, False], ids=["made by its host", "made by nobody"])
def test_replicas_outlive_the_tracker(
    quick_cluster: Cluster, with_tracker: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xinference_xavier")
    owner, reader = owner_and_reader(quick_cluster, TP2)
    ask(owner, prompt(2, LENGTH))
    quick_cluster.settle()
    quick_cluster.tracker.stop()
    until(lambda: caplog.text.count("No heartbeat") == 2, "both to notice")
    assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK  # from memory
    ask(owner, prompt(3, LENGTH))  # told to nobody
    assert ask(reader, prompt(3, LENGTH)).cached == 0
    quick_cluster.tracker.start(tracker=with_tracker)
    until(lambda: caplog.text.count("answers again") == 2, "both to find it")
    assert ask(reader, prompt(2, LENGTH)).cached == 5 * BLOCK
    quick_cluster.settle()
    answers_again(quick_cluster, owner, reader, 4)
    assert not failures(reader)
    assert caplog.text.count("No heartbeat") == 2
    assert caplog.text.count("shares with replica") == 2  # nobody was met anew


def test_the_tracker_takes_over_the_secret(quick_cluster: Cluster) -> None:
    owner, _ = owner_and_reader(quick_cluster, TP2)
    quick_cluster.tracker.stop()
    quick_cluster.tracker.start()

    async def secret() -> bytes:
        tracker = await find_tracker(quick_cluster.tracker.address)
        assert tracker is not None
        found: bytes = await tracker.secret()
        return found

    until(lambda: entries_by_member(quick_cluster, owner), "a heartbeat")
    assert on_loop(owner, secret) == cluster_secret()


def test_a_peer_that_does_not_come_back_with_the_tracker_is_gone(quick_cluster: Cluster) -> None:
    owner, reader = owner_and_reader(quick_cluster, TP2)
    quick_cluster.tracker.stop()
    owner.connector._bridge.close(20)
    quick_cluster.tracker.start()
    until(lambda: not usable(reader), "the peer to be forgotten")
    assert sharing_of(reader).mirror.members() == ()
    assert ask(reader, prompt(1, LENGTH)).cached == 0


@pytest.mark.parametrize("then", ["nothing follows", "more follows"])
def test_lost_batches_are_made_up_for(quick_cluster: Cluster, then: str) -> None:
    owner, reader = quick_cluster.pair(TP2)
    share = sharing_of(reader)
    with deaf(reader):
        ask(owner, prompt(1, LENGTH))
        published = sharing_of(owner)._setup.publisher
        until(lambda: published.number >= 1, "a batch")
    if then == "more follows":
        ask(owner, prompt(2, LENGTH))
    quick_cluster.settle()
    assert share.mirror.wanted({member_of(owner): published.number}) == []
    assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK


def test_a_tracker_that_answers_nothing_delays_nobody(
    quick_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is stopped, or so busy that calls time out."""
    owner, reader = owner_and_reader(quick_cluster, TP2)
    tracker = quick_cluster.tracker
    blocked = stop_loop(tracker._loop)
    began = time.monotonic()
    assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK
    ask(owner, prompt(2, LENGTH))
    assert time.monotonic() - began < 5
    blocked()
    answers_again(quick_cluster, owner, reader, 3)


def stop_loop(loop: object) -> Callable[[], None]:
    """Keep an event loop from running anything until the result is called."""
    import asyncio
    import threading

    assert isinstance(loop, asyncio.AbstractEventLoop)
    over, stopped = threading.Event(), threading.Event()

    def wait() -> None:
        stopped.set()
        over.wait(30)

    loop.call_soon_threadsafe(wait)
    assert stopped.wait(10)
    return over.set


def test_a_replica_that_starts_anew_takes_its_predecessors_place(quick_cluster: Cluster) -> None:
    """The old one may even be alive: its last words are not heard."""
    owner, reader = owner_and_reader(quick_cluster, TP2)
    old = member_of(owner)
    quick_cluster.replicas.remove(owner)
    new = quick_cluster.add_as(TP2, number=0)
    until(lambda: usable(reader) == (member_of(new),), "the new one to be met")
    assert sharing_of(reader).mirror.members() in ((), (member_of(new),))
    assert old not in entries_by_member(quick_cluster, reader)
    assert ask(reader, prompt(1, LENGTH)).cached == 0
    answers_again(quick_cluster, new, reader, 2)
    assert old not in entries_by_member(quick_cluster, reader)


def entries_by_member(cluster: Cluster, asker: object) -> dict[str, ReplicaEntry]:
    """What the tracker knows."""

    async def replicas() -> dict[str, ReplicaEntry]:
        tracker = await find_tracker(cluster.tracker.address)
        assert tracker is not None
        return {entry["share"]["member"]: entry for entry in pickle.loads(await tracker.replicas())}

    found: dict[str, ReplicaEntry] = on_loop(asker, replicas)  # type: ignore[arg-type]
    return found
