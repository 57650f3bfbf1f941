"""One fetch: a lease at the owner, one read per rank, and the verdict.

Covers: the order of these, deadlines, and telling ranks and engine how it ended. Does not cover
what to fetch (the engine), the lease (``borrower.py``) or the transfer (``storage/transport.py``).
Runs on the bridge's event loop; the scheduler thread only finds the outcomes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xoscar as xo

from xinference_xavier.policy.leases import NOT_NOW
from xinference_xavier.types import NOWHERE

from .borrower import Borrower, Loan
from .peers import Peer, Peers
from .tier import FetchResult

logger = logging.getLogger(__name__)

#: How long our own rank may take to be told the end.
SETTLE_SECONDS = 2.0
#: What a rank's answer may lag behind its own deadline.
GRACE_SECONDS = 2.0
#: How often a rank that did not answer is asked again whether bytes may still land.
LANDED_SECONDS = 5.0

#: Reasons that say nothing about the peer itself.
_BLAMELESS = ("peer_gone", "lease_lost", "bridge_gone", "not_verified")
#: A call that never reached a rank of ours has begun no read there.
_NOT_BEGUN = (xo.ActorNotExist, ConnectionRefusedError)


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
    #: Some rank may not know the end: its loads that wait have to be told on another way.
    untold: bool = False

    @classmethod
    def nothing(cls, order: FetchOrder, reason: str) -> FetchOutcome:
        """Of a fetch that never began."""
        return cls(order.fetch_id, range(len(order.keys)), False, 0.0, 0.0, reason, True)


class Landed(NamedTuple):
    """Nothing of a quarantined fetch can land any more."""

    fetch_id: int


class _FetchError(Exception):
    """The fetch has failed. ``args``: the reason as a label, and as a sentence."""

    def __init__(self, label: str, detail: object = "") -> None:
        super().__init__(label, str(detail))
        self.label = label


@dataclass(eq=False)
class _Attempt:
    """A fetch under way."""

    order: FetchOrder
    began: float = field(default_factory=time.perf_counter)
    #: Whether ranks were asked to read, and what each answered.
    reading: bool = False
    results: list[FetchResult] = field(default_factory=list)
    #: Positions whose bytes did not arrive, and why.
    failed: Sequence[int] = ()
    reason: str = ""

    def fail(self, reason: str) -> None:
        """Nothing of it counts."""
        self.failed, self.reason = range(len(self.order.keys)), reason

    @property
    def late(self) -> bool:
        """Whether bytes may still land."""
        unanswered = self.reading and not self.results
        return unanswered or any(result.status == "late" for result in self.results)

    def outcome(self, told: bool) -> FetchOutcome:
        read_seconds = max((result.seconds for result in self.results), default=0.0)
        seconds = time.perf_counter() - self.began
        return FetchOutcome(
            *(self.order.fetch_id, self.failed, self.late, seconds, read_seconds),
            reason=self.reason,
            untold=not told,
        )


class Fetcher:
    """Runs fetches; ``tell`` is called with outcomes, on the event loop: once for every order,
    whatever happens.

    ``forget`` is told which keys a member turned out not to hold. With ``checks`` what arrives is
    compared with checksums of the owner's, if it keeps any.
    """

    def __init__(
        self,
        borrower: Borrower,
        peers: Peers,
        tell: Callable[[FetchOutcome | Landed], None],
        forget: Callable[[str, Collection[bytes]], None] = lambda member, keys: None,
        checks: bool = False,
    ) -> None:
        self._borrower = borrower
        self._peers = peers
        self._tell = tell
        self._forget = forget
        self._checks = checks
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, order: FetchOrder) -> None:
        """Begin a fetch; returns at once."""
        if self._closed:
            self._tell(FetchOutcome.nothing(order, "bridge_gone"))
            return
        task = asyncio.ensure_future(self._run(_Attempt(order)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all fetches as failed."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()

    async def _run(self, attempt: _Attempt) -> None:
        told = False
        try:
            await self._try(attempt)
            told = await self._settle(attempt)
        except asyncio.CancelledError:
            attempt.fail("bridge_gone")
            raise
        finally:
            self._tell(attempt.outcome(told))
        if attempt.late:
            await self._wait_landed(attempt.order.fetch_id)

    async def _try(self, attempt: _Attempt) -> None:
        """Fetch; failures end up in ``attempt``."""
        member = attempt.order.member
        peer = self._peers.get(member)
        try:
            if peer is None or not peer.ready:
                raise _FetchError("peer_gone")
            await self._fetch(attempt, peer)
            self._peers.succeeded(peer)
        except _FetchError as error:
            left = self._peers.get(member) is not peer  # while its rows were leased or read
            attempt.fail("peer_gone" if left else error.label)
            logger.debug("xavier: fetch %d: %r", attempt.order.fetch_id, error)
            if peer is not None and error.label not in _BLAMELESS:
                self._peers.failed(peer, ": ".join(str(part) for part in error.args if part))
        except Exception as error:
            attempt.fail("internal")
            logger.warning("xavier: a fetch failed", exc_info=True)
            if peer is not None:
                self._peers.failed(peer, repr(error))

    async def _fetch(self, attempt: _Attempt, peer: Peer) -> None:
        order = attempt.order
        try:
            loan = await self._borrower.lease(peer, order.keys, order.deadline_seconds)
        except Exception as error:
            raise _FetchError("lease_failed", repr(error)) from error
        found = loan.found
        granted = [i for i, location in enumerate(found) if location > NOT_NOW]
        held, checksums = False, None
        sources = array("q", (found[i] for i in granted)).tobytes()
        targets = array("q", (order.locations[i] for i in granted)).tobytes()
        try:
            if granted:
                if self._checks:  # while the rows are kept for us, and hold what was granted
                    checksums = await self._borrower.checksums(loan, sources)
                attempt.reading = True
                attempt.results = await self._read(order, peer, sources, targets)
                self._check(attempt.results)
        finally:
            held = await self._borrower.release(loan)
        if granted and not held:
            raise _FetchError("lease_lost")
        self._note_refused(attempt, found)
        if checksums is not None:
            wrong = await self._verify(targets, checksums, order.deadline_seconds)
            self._note_wrong(attempt, loan, [granted[i] for i in wrong])

    async def _verify(self, targets: bytes, checksums: Sequence[Any], seconds: float) -> list[int]:
        """Positions whose row, on any rank, is not what the owner's rank stored."""
        pairs = zip(self._peers.tiers, checksums, strict=True)
        calls = (tier.verify(targets, told) for tier, told in pairs)
        try:
            answers = await asyncio.gather(*(xo.wait_for(call, seconds) for call in calls))
        except Exception as error:  # a rank of ours, which has only read
            raise _FetchError("not_verified", repr(error)) from error
        return sorted(set().union(*answers))

    def _note_wrong(self, attempt: _Attempt, loan: Loan, wrong: Sequence[int]) -> None:
        """Positions whose bytes are not those stored: they do not count, and are asked for no
        more, here or by others."""
        if not wrong:
            return
        keys = [attempt.order.keys[i] for i in wrong]
        attempt.failed = sorted({*attempt.failed, *wrong})
        attempt.reason = "mismatch"
        self._forget(attempt.order.member, keys)
        self._borrower.doubt(loan, keys)

    def _note_refused(self, attempt: _Attempt, found: Sequence[int]) -> None:
        """Positions that the owner did not lease. What it does not hold, nobody asks it again."""
        order = attempt.order
        attempt.failed = [i for i, location in enumerate(found) if location <= NOT_NOW]
        stale = [order.keys[i] for i in attempt.failed if found[i] == NOWHERE]
        if stale:
            self._forget(order.member, stale)
        if attempt.failed:
            attempt.reason = "stale" if stale else "capped"

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
        """A rank of our own that does not answer may still be reading."""
        if isinstance(answer, FetchResult):
            return answer
        if not isinstance(answer, TimeoutError | asyncio.TimeoutError):
            self._peers.give_up(f"the actor of a rank does not answer: {answer!r}")
        return FetchResult(
            "failed" if isinstance(answer, _NOT_BEGUN) else "late", error=repr(answer)
        )

    @staticmethod
    def _check(results: Sequence[FetchResult]) -> None:
        for label in ("late", "failed"):
            errors = [result.error for result in results if result.status == label]
            if errors:
                raise _FetchError("timed_out" if label == "late" else "read_failed", errors[0])

    async def _settle(self, attempt: _Attempt) -> bool:
        """Tell the ranks before the engine: loads that wait go on in each. Whether all know."""
        order, failed = attempt.order, attempt.failed
        every = len(failed) == len(order.keys)
        lost = None if every else [order.locations[position] for position in failed]
        answers = await asyncio.gather(
            *(
                xo.wait_for(tier.settle(order.fetch_id, lost), SETTLE_SECONDS)
                for tier in self._peers.tiers
            ),
            return_exceptions=True,
        )
        return not any(isinstance(answer, BaseException) for answer in answers)

    async def _wait_landed(self, fetch_id: int) -> None:
        """A rank that cannot be asked keeps its rows in quarantine."""
        while True:
            waits = (tier.landed(fetch_id) for tier in self._peers.tiers)
            answers = await asyncio.gather(*waits, return_exceptions=True)
            if not any(isinstance(answer, BaseException) for answer in answers):
                break
            await asyncio.sleep(LANDED_SECONDS)
        self._tell(Landed(fetch_id))
