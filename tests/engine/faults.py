"""What goes wrong between replicas that share, brought about on purpose.

Everything acts on one replica of ``sharing_cluster``: its actors, its rank's transport, its mirror.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import xoscar as xo
from checks import check_step
from harness import Replica
from shapes import BLOCK, HYBRID, TP2, Shape
from sharing_cluster import Cluster, ask, sharing_of, until, usable
from test_bytes import prompt

from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.storage.peer_reader import Read
from xinference_xavier.types import TransferError

LENGTH = 5 * BLOCK + 1

#: xoscar leaves client connections to the collector.
quiet = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
both_shapes = pytest.mark.parametrize("shape", [TP2, HYBRID], ids=["tp2", "hybrid"])


def owner_and_reader(cluster: Cluster, shape: Shape, *, number: int = 1) -> tuple[Replica, Replica]:
    """A pair, of which the first holds a prompt that the second knows of."""
    owner, reader = cluster.pair(shape)
    ask(owner, prompt(number, LENGTH))
    cluster.settle()
    return owner, reader


def failures(replica: Replica) -> dict[str, int]:
    return dict(replica.manager.fetching.failures)


def on_loop(replica: Replica, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine on the replica's bridge, and wait for it."""

    async def run() -> Any:
        return await work()

    return asyncio.run_coroutine_threadsafe(run(), sharing_of(replica)._loop).result(20)


def stop_bridge(replica: Replica) -> None:
    """Its actor pool is gone; its memory stays readable."""
    replica.connector._bridge.close(20)


def transport(replica: Replica, rank: int = 0) -> Any:
    return replica.ranks[rank].connector._worker._share._transport


def tier_server(replica: Replica, rank: int = 0) -> Any:
    return replica.ranks[rank].connector._worker._share._server


def destroy_replica_actor(replica: Replica) -> None:
    async def destroy() -> None:
        address = replica.connector._bridge.address
        await xo.destroy_actor(await xo.actor_ref(uid=REPLICA_UID, address=address))

    on_loop(replica, destroy)


def destroy_tier_actor(replica: Replica, rank: int = 0) -> None:
    tier = sharing_of(replica)._setup.tiers[rank]

    async def destroy() -> None:
        await xo.destroy_actor(await xo.actor_ref(uid=tier.uid, address=tier.address))

    on_loop(replica, destroy)


class HeldReads:
    """Reads of one rank that begin when the test says so, or never.

    With ``late`` a read times out here and its bytes land later: as a stopped peer over tcp does,
    it delivers at ``land``, whatever has become of the rows.
    """

    def __init__(self, replica: Replica, rank: int = 0, *, late: bool = False) -> None:
        self._transport = transport(replica, rank)
        self._read = self._transport.read
        self._late = late
        self._held: list[tuple[Read, tuple[Any, ...]]] = []
        self.began = threading.Semaphore(0)
        self._transport.read = self._hold

    def _hold(self, peer: Any, sources: Any, targets: Any, *rest: Any) -> Read:
        read = Read()
        self._held.append((read, (peer, sources.copy(), targets.copy(), *rest)))
        self.began.release()
        if self._late:
            read.done.set_exception(TransferError("the peer did not deliver in time"))
        return read

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.began.acquire(timeout=20), "no read began"

    def land(self) -> None:
        """Let what is held go on, and everything after it at once."""
        self._transport.read = self._read
        for read, arguments in self._held:
            real = self._read(*arguments)
            if self._late:
                real.settled.result(20)
                read.settled.set_result(None)
            else:
                real.settled.add_done_callback(lambda _, read=read: read.settled.set_result(None))
                real.done.add_done_callback(lambda done, read=read: _copy(done, read.done))
        self._held.clear()

    def fail(self, text: str = "the connection broke") -> None:
        """End what is held as failed."""
        for read, _ in self._held:
            read.fail(TransferError(text))
        self._held.clear()

    def go_on(self) -> None:
        self._transport.read = self._read


def _copy(source: Future[float], target: Future[float]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


def failing_reads(replica: Replica, rank: int = 0) -> Callable[[], None]:
    """Every read of a rank fails at once; call the result to heal it."""
    held = HeldReads(replica, rank)
    hold = held._transport.read

    def fail(*arguments: Any) -> Read:
        read: Read = hold(*arguments)
        held.fail()
        return read

    held._transport.read = fail
    return held.go_on


@contextmanager
def silent_leases(replica: Replica) -> Iterator[threading.Semaphore]:
    """The replica accepts calls for leases and never answers; counts them."""
    asked = threading.Semaphore(0)
    lender = sharing_of(replica)._setup.lender

    async def hang(*_: Any) -> Any:
        asked.release()
        await asyncio.Event().wait()

    lender.lease = hang  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        del lender.lease


@contextmanager
def deaf(replica: Replica) -> Iterator[None]:
    """Batches from the tracker are lost on their way."""
    share = sharing_of(replica)

    async def lose(batches: Sequence[Any]) -> None:
        raise ConnectionError("lost on purpose")

    share.hear = lose  # type: ignore[method-assign]
    try:
        yield
    finally:
        del share.hear


@contextmanager
def frozen_mirror(replica: Replica) -> Iterator[None]:
    """The replica learns nothing new of what its peers hold."""
    share = sharing_of(replica)
    share.mirror.wanted = lambda numbers: []  # type: ignore[method-assign]
    try:
        with deaf(replica):
            yield
    finally:
        del share.mirror.wanted


@contextmanager
def remembered_peers(replica: Replica) -> Iterator[None]:
    """The replica learns of no peer that leaves."""
    peers = sharing_of(replica).peers
    assert peers is not None
    peers.update = lambda entries, whole=True: set()  # type: ignore[method-assign]
    try:
        yield
    finally:
        del peers.update


def steps(replica: Replica, count: int) -> None:
    for _ in range(count):
        replica.step()
        check_step(replica)


def answers_again(cluster: Cluster, owner: Replica, reader: Replica, number: int) -> None:
    """Whatever happened is over: a new prompt of the owner's is a hit at the reader."""
    until(lambda: len(usable(reader)) == len(cluster.replicas) - 1, "the peer to be met again")
    ask(owner, prompt(number, LENGTH))
    cluster.settle()
    assert ask(reader, prompt(number, LENGTH)).cached == 5 * BLOCK
