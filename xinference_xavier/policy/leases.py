"""Rows that peers are reading: leases with an end.

Covers: granting rows that hold bytes, caps, release with a verdict, expiry. Does not cover who may
ask (``actors``). Called from the replica's bridge thread under the manager's lock, with the clock
passed in; the scheduler thread never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xinference_xavier.policy.columns import LEAVING, READY
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.types import NOWHERE, row_of

#: In the place of a location: the key is here, and cannot be leased at the moment.
NOT_NOW = NOWHERE + 1

#: Rows that one peer may hold, of all rows, and that all peers together may.
PEER_SHARE, ALL_SHARE = 4, 2


@dataclass(slots=True)
class Lease:
    """Pinned rows of one peer until ``ends`` (monotonic seconds)."""

    peer: str
    locations: list[int]
    ends: float


class Leases:
    """Leases of one replica's rows, by number.

    A peer reads the rows while it holds the lease. What it read counts only if ``release`` says
    that the lease had not ended by then: an expired lease's rows may hold something else.
    """

    def __init__(self, index: SnapshotIndex) -> None:
        self._index = index
        self._next_id = 1
        self._leases: dict[int, Lease] = {}
        self._rows_of: dict[str, int] = {}
        #: Rows of leases that have ended, still pinned.
        self._ended: list[int] = []
        self.granted = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def rows(self) -> int:
        """Rows under lease; one under two leases counts twice."""
        return sum(self._rows_of.values())

    def room(self, peer: str) -> int:
        """Rows that ``peer`` may lease now."""
        rows = self._index.gpu.rows + self._index.cpu.rows
        mine = rows // PEER_SHARE - self._rows_of.get(peer, 0)
        return max(0, min(mine, rows // ALL_SHARE - self.rows))

    def open(self, peer: str, now: float, ttl_seconds: float) -> int:
        """A new, empty lease; its number."""
        lease_id, self._next_id = self._next_id, self._next_id + 1
        self._leases[lease_id] = Lease(peer, [], now + ttl_seconds)
        self.granted += 1
        return lease_id

    def extend(self, lease_id: int, keys: Sequence[bytes]) -> list[int]:
        """Pin each key's row under the lease; its location, ``NOWHERE`` if the key is not here, or
        ``NOT_NOW``: it is being written, the caps are reached, or the lease ended meanwhile.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return [NOT_NOW] * len(keys)
        room = self.room(lease.peer)
        found = []
        for key in keys:
            location = self._index.where(key)
            tier, row = self._index.rows_at(location), row_of(location)
            if location == NOWHERE:
                found.append(NOWHERE)
                continue
            if not room or tier.state[row] not in (READY, LEAVING):
                found.append(NOT_NOW)
                continue
            tier.pin(row)
            room -= 1
            lease.locations.append(location)
            found.append(location)
        held = sum(1 for location in found if location > NOT_NOW)
        self._rows_of[lease.peer] = self._rows_of.get(lease.peer, 0) + held
        return found

    def release(self, lease_id: int, at_once: bool = True) -> bool:
        """End a lease; whether it had held until now.

        Unless ``at_once``, its rows stay pinned until ``give_back``: pieces of work for large ones.
        """
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        left = self._rows_of.get(lease.peer, 0) - len(lease.locations)
        if left:
            self._rows_of[lease.peer] = left
        else:
            self._rows_of.pop(lease.peer, None)
        # In reverse: a prefix's head becomes the newest, as after a load.
        self._ended += lease.locations[::-1]
        if at_once:
            self.give_back(len(self._ended))
        return True

    def give_back(self, count: int) -> bool:
        """Unpin up to ``count`` rows of leases that have ended; whether more are left."""
        given, self._ended = self._ended[:count], self._ended[count:]
        self._index.count_peer_uses(given)
        self._index.unpin(given, 0)
        return bool(self._ended)

    def expire(self, now: float, at_once: bool = True) -> int:
        """End the leases that are over, as ``release`` does; how many."""
        over = [lease_id for lease_id, lease in self._leases.items() if lease.ends <= now]
        for lease_id in over:
            self.release(lease_id, at_once)
        self.expired += len(over)
        return len(over)
