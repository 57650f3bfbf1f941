"""Leases that this replica has at its peers: asking for them, and giving every one of them back.

Covers: time limits, and answers that come after them. Does not cover what is read under a lease
(``fetcher.py``) or the rules of leases (``policy/leases.py``). Runs on the bridge's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xoscar as xo

from xinference_xavier import swallowed

from .peers import Peer, Peers
from .replica import ReplicaActor

logger = logging.getLogger(__name__)

#: How long the owner may take to answer a call.
CALL_SECONDS = 2.0


@dataclass(frozen=True)
class Loan:
    """One lease; ``found`` has a location, ``NOWHERE`` or ``NOT_NOW`` for each key."""

    owner: xo.ActorRefType[ReplicaActor]
    lease_id: int
    found: Sequence[int]


class Borrower:
    """Asks peers for leases in the name of member ``me``.

    Calls are not cancelled when their time is over, as ``xo.wait_for`` does: an owner that was
    stopped and goes on would keep rows for a peer that knows nothing of it.
    """

    def __init__(self, me: str, peers: Peers, ttl_seconds: float) -> None:
        self._me = me
        self._peers = peers
        self._ttl_seconds = ttl_seconds
        self._calls: set[asyncio.Future[Any]] = set()

    def close(self) -> None:
        for call in list(self._calls):
            call.cancel()

    async def lease(self, peer: Peer, keys: Sequence[bytes], limit_seconds: float) -> Loan:
        """Ask for equally long ``keys``. Raises what the call raises, or ``TimeoutError``."""
        limit = min(limit_seconds, CALL_SECONDS)
        owner = await xo.wait_for(self._peers.reach(peer), limit)
        call = owner.lease(
            *(self._peers.token, self._me, b"".join(keys), len(keys[0]), self._ttl_seconds)
        )

        def release_late(answer: tuple[int, list[int]]) -> None:
            self._keep(self.release(Loan(owner, *answer)))

        return Loan(owner, *await self._await(call, limit, release_late))

    async def release(self, loan: Loan) -> bool:
        """Whether the lease had held until now; False when the owner does not say."""
        try:
            call = loan.owner.release(self._peers.token, loan.lease_id)
            return bool(await self._await(call, CALL_SECONDS))
        except Exception:
            swallowed.note(logger, "release", "releasing a lease failed", level=logging.INFO)
            return False

    async def checksums(self, loan: Loan, locations: bytes) -> list[Any] | None:
        """What each rank of the owner knows of rows under the lease; None if it does not say."""
        try:
            call = loan.owner.checksums(self._peers.token, locations)
            answer: list[Any] | None = await self._await(call, CALL_SECONDS)
        except Exception:
            swallowed.note(logger, "checksums", "a fetch is not verified", level=logging.INFO)
            return None
        return answer

    def doubt(self, loan: Loan, keys: Sequence[bytes]) -> None:
        """Tell the owner that it served other bytes than were stored under equally long ``keys``.
        Returns at once; the owner may take a step's time."""
        call = loan.owner.doubt(self._peers.token, b"".join(keys), len(keys[0]))
        self._keep(call).add_done_callback(_log_failure)

    async def _await(
        self,
        call: Awaitable[Any],
        limit_seconds: float,
        late: Callable[[Any], None] = lambda answer: None,
    ) -> Any:
        """A call's answer; ``late`` gets one that comes after the limit."""
        task = self._keep(call)
        await asyncio.wait({task}, timeout=limit_seconds)
        if task.done():
            return task.result()

        def pass_on(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and done.exception() is None:
                late(done.result())

        task.add_done_callback(pass_on)
        raise TimeoutError

    def _keep(self, call: Awaitable[Any]) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task


def _log_failure(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        logger.debug("xavier: an owner does not take a doubt: %r", done.exception())
