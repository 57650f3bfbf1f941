"""One fetch: a lease at the owner, one read per rank, and the verdict.

Covers: the order of these, deadlines, and telling ranks and engine how it ended. Does not cover
what to fetch (the engine) or the transfer (``storage/transport.py``). Runs on the bridge's event
loop; the scheduler thread only finds the outcomes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import xoscar as xo

from xinference_xavier.types import NOWHERE

from .peers import Peer, Peers
from .tier import FetchResult

logger = logging.getLogger(__name__)

#: How long the owner may take to answer a call, and our own rank to be told the end.
CALL_SECONDS = 2.0
#: What a rank's answer may lag behind its own deadline.
GRACE_SECONDS = 2.0


class FetchOrder(NamedTuple):
    """What the engine wants: ``keys`` of ``member`` into ``locations`` of ours."""

    fetch_id: int
    member: str
    keys: Sequence[bytes]
    locations: Sequence[int]
    #: What computing would take: a fetch that lasts longer is of no use.
    deadline_seconds: float


class FetchOutcome(NamedTuple):
    """How it ended, for the scheduler thread."""

    fetch_id: int
    #: Positions whose bytes did not arrive.
    failed: Sequence[int]
    #: Bytes may still land in the failed positions' rows; a ``Landed`` follows.
    quarantined: bool
    seconds: float
    #: Seconds of reading alone, the slowest rank's.
    read_seconds: float
    #: Empty, or why it failed: a metric label.
    reason: str

    @classmethod
    def nothing(cls, order: FetchOrder, reason: str) -> FetchOutcome:
        """Of a fetch that never began."""
        return cls(order.fetch_id, range(len(order.keys)), False, 0.0, 0.0, reason)


class Landed(NamedTuple):
    """Nothing of a quarantined fetch can land any more."""

    fetch_id: int


class _FetchError(Exception):
    """The fetch has failed. ``args``: the reason as a label, and as a sentence."""

    def __init__(self, label: str, detail: object = "") -> None:
        super().__init__(label, str(detail))
        self.label = label


class Fetcher:
    """Runs fetches; ``tell`` is called with outcomes, on the event loop."""

    def __init__(
        self,
        me: str,
        peers: Peers,
        ttl_seconds: float,
        tell: Callable[[FetchOutcome | Landed], None],
    ) -> None:
        self._me = me
        self._peers = peers
        self._ttl_seconds = ttl_seconds
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, order: FetchOrder) -> None:
        """Begin a fetch; returns at once."""
        task = asyncio.ensure_future(self._run(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _run(self, order: FetchOrder) -> None:
        started = time.perf_counter()
        failed: Sequence[int] = range(len(order.keys))
        results: list[FetchResult] = []
        reason = ""
        peer = self._peers.get(order.member)
        try:
            if peer is None or not peer.agents:
                raise _FetchError("peer_gone")
            failed = await self._fetch(order, peer, results)
            self._peers.succeeded(peer)
            reason = "stale" if failed else ""
        except Exception as error:
            reason = error.label if isinstance(error, _FetchError) else "internal"
            logger.debug("xavier: fetch %d: %r", order.fetch_id, error)
            if reason == "internal":
                logger.warning("xavier: a fetch failed", exc_info=True)
            if peer is not None:
                self._note_failure(peer, reason, error)
        late = any(result.status == "late" for result in results)
        await self._settle(order, failed)
        read_seconds = max((result.seconds for result in results), default=0.0)
        seconds = time.perf_counter() - started
        self._tell(FetchOutcome(order.fetch_id, failed, late, seconds, read_seconds, reason))
        if late:
            await self._wait_landed(order.fetch_id)

    def _note_failure(self, peer: Peer, reason: str, error: Exception) -> None:
        """All but a lost lease says something about the peer itself."""
        if reason == "lease_lost":
            return
        peer.ref = None
        self._peers.failed(peer, ": ".join(str(part) for part in error.args if part))

    async def _fetch(
        self, order: FetchOrder, peer: Peer, results: list[FetchResult]
    ) -> Sequence[int]:
        """Positions that the owner did not have; ``results`` gets each rank's answer."""
        token = self._peers.token
        try:
            ref = await xo.wait_for(self._peers.reach(peer), CALL_SECONDS)
            asking = ref.lease(
                *(token, self._me, b"".join(order.keys), len(order.keys[0]), self._ttl_seconds)
            )
            lease_id, found = await xo.wait_for(asking, CALL_SECONDS)
        except Exception as error:
            raise _FetchError("lease_failed", repr(error)) from error
        granted = [i for i, location in enumerate(found) if location != NOWHERE]
        held = False
        try:
            if granted:
                sources = array("q", (found[i] for i in granted)).tobytes()
                targets = array("q", (order.locations[i] for i in granted)).tobytes()
                results += await self._read(order, peer, sources, targets)
                self._check(results)
        finally:
            held = await self._release(ref, token, lease_id)
        if granted and not held:
            raise _FetchError("lease_lost")
        return [i for i, location in enumerate(found) if location == NOWHERE]

    async def _read(
        self, order: FetchOrder, peer: Peer, sources: bytes, targets: bytes
    ) -> list[FetchResult]:
        """Every rank reads from the same rank of the peer, at the same time."""
        answers = await asyncio.gather(
            *(
                xo.wait_for(
                    tier.fetch(order.fetch_id, agent, sources, targets, order.deadline_seconds),
                    order.deadline_seconds + GRACE_SECONDS,
                )
                for tier, agent in zip(self._peers.tiers, peer.agents, strict=True)
            ),
            return_exceptions=True,
        )
        return [self._as_result(answer) for answer in answers]

    def _as_result(self, answer: FetchResult | BaseException) -> FetchResult:
        """A rank of our own that does not answer may still be reading, unless it has no actor."""
        if isinstance(answer, FetchResult):
            return answer
        self._peers.give_up(f"the actor of a rank does not answer: {answer!r}")
        return FetchResult(
            "failed" if isinstance(answer, xo.ActorNotExist) else "late", error=repr(answer)
        )

    @staticmethod
    def _check(results: Sequence[FetchResult]) -> None:
        for label in ("late", "failed"):
            errors = [result.error for result in results if result.status == label]
            if errors:
                raise _FetchError("timed_out" if label == "late" else "read_failed", errors[0])

    async def _release(self, ref: Any, token: str, lease_id: int) -> bool:
        """Whether the lease had held; False when the owner does not say."""
        try:
            return bool(await xo.wait_for(ref.release(token, lease_id), CALL_SECONDS))
        except Exception as error:
            logger.debug("xavier: releasing lease %d failed: %r", lease_id, error)
            return False

    async def _settle(self, order: FetchOrder, failed: Sequence[int]) -> None:
        """Tell the ranks before the engine: loads that wait go on in each."""
        every = len(failed) == len(order.keys)
        lost = None if every else [order.locations[position] for position in failed]
        await asyncio.gather(
            *(
                xo.wait_for(tier.settle(order.fetch_id, lost), CALL_SECONDS)
                for tier in self._peers.tiers
            ),
            return_exceptions=True,
        )

    async def _wait_landed(self, fetch_id: int) -> None:
        """A rank that cannot be asked keeps its rows in quarantine."""
        waits = (tier.landed(fetch_id) for tier in self._peers.tiers)
        answers = await asyncio.gather(*waits, return_exceptions=True)
        if not any(isinstance(answer, BaseException) for answer in answers):
            self._tell(Landed(fetch_id))
