"""One replica among its peers: what it tells them, hears from them, lends and fetches.

Covers: publishing changes, mirroring the others, catching up after losses, and the entrance for
the scheduler thread. Does not cover leases (``lender.py``), connections (``peers.py``) or a single
fetch (``fetcher.py``). Runs on the bridge's event loop, except what is marked otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import xoscar as xo

from xinference_xavier import swallowed
from xinference_xavier.policy.directory import Batch, Publisher
from xinference_xavier.policy.mirror import Mirror
from xinference_xavier.storage.row_check import Checksums

from .borrower import Borrower
from .fetcher import Fetcher, FetchOrder, FetchOutcome, Landed
from .heartbeat import Heartbeat
from .lender import Lender
from .peers import Peers
from .registry import ShareEntry
from .tier import TierActor, TierAddress
from .tracker import HeartbeatReply

logger = logging.getLogger(__name__)

#: How often changes are published.
PUBLISH_SECONDS = 0.02
#: How often peers are looked after.
TICK_SECONDS = 0.1
#: Batches sent before others get a turn.
BATCHES_PER_TURN = 16
CALL_SECONDS = 5.0
#: How long a batch that overtook another one waits for it before the whole is asked for.
LATE_SECONDS = 0.2
#: After a tracker came back empty, peers that have not found it again are kept for this long.
PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class ShareSetup:
    """What the engine knows once its ranks have reported.

    Attributes:
        entry: for the tracker.
        token: shows that a caller is of the same namespace and cluster.
        tiers: where this replica's ranks listen, in rank order.
        memories: what peers need to read each rank's slabs.
        ttl_seconds: for how long this replica's leases at peers are.
        lender: lends this replica's rows.
        publisher: what changed in the index.
        readable: all keys of the index; called on the bridge's thread.
        tell: gets the outcome of each fetch, on the bridge's thread.
    """

    entry: ShareEntry
    token: str
    tiers: Sequence[TierAddress]
    memories: Sequence[Any]
    ttl_seconds: float
    lender: Lender
    publisher: Publisher
    readable: Callable[[], Iterable[bytes]]
    tell: Callable[[FetchOutcome | Landed], None]
    #: Whether this replica's ranks keep checksums of what they store.
    checks: bool = False


class Sharing:
    """Implements ``replica.ShareFace``. Made and run on the bridge's loop."""

    def __init__(self, setup: ShareSetup, heartbeat: Heartbeat) -> None:
        self._setup = setup
        self._heartbeat = heartbeat
        self.token = setup.token
        self.memories = setup.memories
        self.mirror = Mirror()
        self.peers: Peers | None = None
        self._fetcher: Fetcher | None = None
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._patient_until = 0.0
        #: Whether the tracker knows this replica: else it takes no batches.
        self._known = True
        self._loop = asyncio.get_running_loop()

    # -- for the scheduler thread ----------------------------------------------------------------

    def longest(self, keys: Sequence[bytes], start: int) -> tuple[str | None, int]:
        """The peer that holds most of ``keys`` from ``start`` on, and how many. Any thread."""
        usable = self.peers.usable if self.peers is not None else ()
        return self.mirror.longest(keys, start, usable) if usable else (None, 0)

    def fetch(self, order: FetchOrder) -> bool:
        """Begin a fetch, whose outcome ``tell`` gets. Any thread; returns at once.

        False: it cannot begin, because the bridge has stopped.
        """
        if self._fetcher is None:
            return False
        try:
            self._loop.call_soon_threadsafe(self._fetcher.start, order)
        except RuntimeError:
            return False
        return True

    # -- life --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Share until cancelled."""
        setup = self._setup
        tiers: list[xo.ActorRefType[TierActor]] = [
            await xo.actor_ref(uid=tier.uid, address=tier.address) for tier in setup.tiers
        ]
        peers = Peers(setup.token, tiers, setup.entry["machine"])
        borrower = Borrower(setup.entry["member"], peers, setup.ttl_seconds)
        self._fetcher = Fetcher(
            borrower, peers, setup.tell, self._forget_stale, checks=setup.checks
        )
        self.peers = peers
        try:
            await asyncio.gather(
                self._publish_forever(), setup.lender.expire_forever(), self._tick_forever(peers)
            )
        finally:
            peers.close()
            self._fetcher.close()
            borrower.close()

    def _forget_stale(self, member: str, keys: Collection[bytes]) -> None:
        for key in keys:
            self.mirror.forget_key(member, key)

    async def _tick_forever(self, peers: Peers) -> None:
        while True:
            peers.tick()
            await asyncio.sleep(TICK_SECONDS)

    async def _publish_forever(self) -> None:
        publisher = self._setup.publisher
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            tracker = self._heartbeat.tracker
            if tracker is None or not self._known:
                continue
            if publisher.needs_restart:
                publisher.restart(self._setup.readable)
            for _ in range(BATCHES_PER_TURN):
                batch = publisher.take()
                if batch is None:
                    break
                if not await self._publish(tracker, batch):
                    publisher.needs_restart, self._known = True, False
                    break

    async def _publish(self, tracker: Any, batch: Batch) -> bool:
        try:
            return bool(await xo.wait_for(tracker.publish(batch), CALL_SECONDS))
        except Exception:
            swallowed.note(
                logger, "publish", "publishing to the tracker failed", level=logging.INFO
            )
            return False

    # -- what the tracker says ---------------------------------------------------------------------

    def hear_heartbeat(self, reply: HeartbeatReply) -> None:
        """Who is there, and how far the directory is."""
        self._known = True
        if self.peers is None:
            return
        numbers, now = dict(reply["numbers"]), time.monotonic()
        own = numbers.pop(self._setup.entry["member"], None)
        publisher = self._setup.publisher
        if own is None and publisher.number >= 0:  # the tracker came back empty
            publisher.needs_restart = True
            self._patient_until = now + PATIENCE_SECONDS
        for member in self.peers.update(reply["peers"], whole=now >= self._patient_until):
            self.mirror.drop(member)
        for member in self.mirror.wanted(numbers):
            self._catch_up(member)

    async def hear(self, batches: Sequence[Batch]) -> None:
        """Batches of peers, from the tracker."""
        for batch in batches:
            if not self.mirror.apply(batch):
                self._loop.call_later(LATE_SECONDS, self._catch_up_if_behind, *batch[:2])
            await asyncio.sleep(0)

    def _catch_up_if_behind(self, member: str, number: int) -> None:
        if self.mirror.wanted({member: number}):
            self._catch_up(member)

    def _catch_up(self, member: str) -> None:
        if member in self._catching_up:
            return
        task = asyncio.ensure_future(self._load(member))
        self._catching_up[member] = task
        task.add_done_callback(lambda _: self._catching_up.pop(member, None))

    async def _load(self, member: str) -> None:
        """Take in the whole of what a member holds."""
        tracker, scope = self._heartbeat.tracker, self._setup.entry["scope"]
        if tracker is None or scope is None:
            return
        try:
            found = await xo.wait_for(tracker.snapshot(scope, member), CALL_SECONDS)
        except Exception:
            swallowed.note(
                logger, "catch_up", "asking for what a peer holds failed", level=logging.INFO
            )
            return
        if found is not None:
            for _ in self.mirror.load(member, *found):
                await asyncio.sleep(0)

    # -- what peers ask ----------------------------------------------------------------------------

    async def lease(
        self, peer: str, keys: Sequence[bytes], ttl_seconds: float
    ) -> tuple[int, list[int]]:
        return await self._setup.lender.lease(peer, keys, ttl_seconds)

    async def release(self, lease_id: int) -> bool:
        return await self._setup.lender.release(lease_id)

    async def checksums(self, locations: bytes) -> list[Checksums | None] | None:
        """What each of our ranks knows of its rows; None while they check nothing."""
        if not self._setup.checks or self.peers is None:
            return None
        calls = (tier.checksums(locations) for tier in self.peers.tiers)
        return list(await asyncio.gather(*calls))
