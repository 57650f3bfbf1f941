"""The replicas that this one can read from: connections, and who is to be left alone for a while.

Covers: meeting a peer (its ranks' memories to our ranks), parting, and a breaker per peer. Does
not cover what peers hold (``policy/directory.py``) or a fetch (``fetcher.py``). Runs on the
bridge's event loop; the scheduler thread reads ``usable``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xoscar as xo

from . import hosts
from .reach import reach
from .registry import PeerEntry
from .replica import REPLICA_UID, ReplicaActor
from .tier import TierActor

logger = logging.getLogger(__name__)

#: How long meeting a peer may take.
MEET_SECONDS = 10.0
#: A peer that failed is left alone for this long, twice as long after each further failure.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0


@dataclass(eq=False)
class Peer:
    """One peer as this replica knows it."""

    entry: PeerEntry
    ref: xo.ActorRefType[ReplicaActor] | None = None
    #: NIXL agent of each of its ranks that ours were told of, in rank order.
    agents: list[str] = field(default_factory=list)
    #: Met since it failed last: only then it is asked for blocks.
    ready: bool = False
    met_before: bool = False
    failures: int = 0
    paused_until: float = 0.0
    meeting: asyncio.Task[None] | None = None


class Peers:
    """Peers by member.

    Args:
        token: shows that this replica belongs to the same namespace and cluster.
        tiers: this replica's ranks, in rank order.
        machine: where a loopback address of a peer means the same as here.
    """

    def __init__(
        self, token: str, tiers: Sequence[xo.ActorRefType[TierActor]], machine: str
    ) -> None:
        self.token = token
        self.tiers = tiers
        self._machine = machine
        self._peers: dict[str, Peer] = {}
        #: Members that may be asked now; replaced as a whole, so that any thread may read it.
        self.usable: frozenset[str] = frozenset()
        self._given_up = False

    def get(self, member: str) -> Peer | None:
        return self._peers.get(member)

    def entries(self) -> list[PeerEntry]:
        return [peer.entry for peer in self._peers.values()]

    def update(self, entries: Sequence[PeerEntry], whole: bool = True) -> set[str]:
        """Take the tracker's word for who is there; returns the members that are gone.

        Unless ``whole``, the tracker has yet to hear from some: then only those are gone in whose
        place somebody else is.
        """
        there = {entry["member"]: entry for entry in entries if self._reachable(entry)}
        places = {_place(entry) for entry in there.values()}
        gone = {
            member
            for member, peer in self._peers.items()
            if member not in there and (whole or _place(peer.entry) in places)
        }
        for member in gone:
            self._part(self._peers.pop(member))
        for member, entry in there.items():
            self._peers.setdefault(member, Peer(entry))
        self.tick()
        return gone

    def failed(self, peer: Peer, reason: str) -> None:
        """A call or a read failed: leave the peer alone for a while, then meet it anew."""
        known = self.get(peer.entry["member"]) is peer
        if known and peer.ready:  # else it left, or another fetch has said so
            self._pause(peer, reason)

    def _pause(self, peer: Peer, reason: str) -> None:
        pause = min(PAUSE_SECONDS * 2**peer.failures, LONGEST_PAUSE_SECONDS)
        if not peer.failures:
            logger.warning(
                "xavier: replica %d of %s cannot be read from (%s); its blocks are computed here "
                "until it answers again",
                *(peer.entry["replica"], peer.entry["model_uid"], reason),
            )
        peer.ref, peer.ready = None, False
        peer.failures += 1
        peer.paused_until = time.monotonic() + pause
        self._refresh()

    def succeeded(self, peer: Peer) -> None:
        """Blocks of the peer arrived, or at least its answer."""
        if peer.failures:
            logger.info(
                "xavier: replica %d of %s is read from again",
                *(peer.entry["replica"], peer.entry["model_uid"]),
            )
        peer.failures = 0

    def give_up(self, reason: str) -> None:
        """This replica itself can read from nobody any more."""
        if not self._given_up:
            logger.warning("xavier: nothing is read from peers any more (%s)", reason)
        self._given_up = True
        self._refresh()

    async def reach(self, peer: Peer) -> xo.ActorRefType[ReplicaActor]:
        if peer.ref is None:
            peer.ref = await reach(REPLICA_UID, peer.entry["address"])
        return peer.ref

    def close(self) -> None:
        for peer in self._peers.values():
            if peer.meeting is not None:
                peer.meeting.cancel()
        self._peers.clear()
        self._refresh()

    def _reachable(self, entry: PeerEntry) -> bool:
        host = hosts.host_of(entry["address"])
        return entry["machine"] == self._machine or not (host and hosts.is_loopback(host))

    def _may_try(self, peer: Peer) -> bool:
        return time.monotonic() >= peer.paused_until

    def _refresh(self) -> None:
        self.usable = frozenset(
            member for member, peer in self._peers.items() if peer.ready and not self._given_up
        )

    def tick(self) -> None:
        """Meet those that are new, or have failed and paused. Requests never try a peer out."""
        for peer in self._peers.values():
            if not peer.ready and peer.meeting is None and self._may_try(peer):
                peer.meeting = asyncio.ensure_future(self._meet(peer))
        self._refresh()

    async def _meet(self, peer: Peer) -> None:
        try:
            await xo.wait_for(self._introduce(peer), MEET_SECONDS)
        except Exception as error:
            self._pause(peer, f"meeting it failed: {type(error).__name__}: {error}")
        finally:
            peer.meeting = None
        self._refresh()

    async def _introduce(self, peer: Peer) -> None:
        ref = await self.reach(peer)
        memories: list[Any] = await ref.meet(self.token)
        if len(memories) != len(self.tiers):
            raise ValueError(f"it has {len(memories)} ranks, this replica {len(self.tiers)}")
        peer.agents = [memory.agent for memory in memories]
        pairs = zip(self.tiers, memories, strict=True)
        await asyncio.gather(*(tier.meet(memory) for tier, memory in pairs))
        peer.ready = True
        if not peer.met_before:  # whether one that failed reads well again, a fetch will show
            logger.info(
                "xavier: shares with replica %d of %s at %s",
                *(peer.entry["replica"], peer.entry["model_uid"], peer.entry["address"]),
            )
            peer.met_before, peer.failures = True, 0

    def _part(self, peer: Peer) -> None:
        if peer.meeting is not None:
            peer.meeting.cancel()
        for tier, agent in zip(self.tiers, peer.agents, strict=False):
            task = asyncio.ensure_future(tier.part(agent))
            task.add_done_callback(_ignore_result)


def _place(entry: PeerEntry) -> tuple[str, int]:
    return entry["model_uid"], entry["replica"]


def _ignore_result(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
