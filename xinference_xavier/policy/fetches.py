"""Rows that are being read from a peer, from the reservation to the last pin.

Covers: which fetch a row waits for, publishing what arrived, forgetting what did not, keeping rows
until their request has loaded them, and quarantine: rows that a peer may still write to, which
nothing else may use. Does not cover when to fetch (``engine``) or the transfer (``actors``,
``storage``). Runs on vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xinference_xavier.policy.columns import FETCHING
from xinference_xavier.policy.counters import Counters
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.keys import tails_first
from xinference_xavier.policy.plans import FetchPlan
from xinference_xavier.types import NOWHERE, row_of

#: Rows that fetches may hold, of all rows: what waits must not crowd out what is used.
HELD_SHARE = 4


class Fetches:
    """Fetches of one replica, by number.

    A fetch holds one pin on each of its rows while the bytes are on their way, and on until
    ``release``: else they could be evicted before their request finds KV blocks, and be fetched
    again for ever.
    """

    def __init__(self, index: SnapshotIndex, counters: Counters) -> None:
        self._index = index
        self._counters = counters
        self._next_id = 1
        #: Bytes on their way.
        self._flying: dict[int, FetchPlan] = {}
        #: Arrived, kept for their request.
        self._kept: dict[int, FetchPlan] = {}
        #: Failed, while bytes may still land: locations only.
        self._quarantined: dict[int, list[int]] = {}
        self._fetch_of: dict[int, int] = {}
        self._held_rows = 0

    @property
    def flying(self) -> int:
        """Fetches whose bytes are on their way."""
        return len(self._flying)

    @property
    def quarantined_rows(self) -> int:
        return sum(map(len, self._quarantined.values()))

    def room(self) -> int:
        """Rows that another fetch may take now."""
        rows = self._index.gpu.rows + self._index.cpu.rows
        return max(0, rows // HELD_SHARE - self._held_rows)

    def start(self, mark: int, keys: list[bytes], locations: list[int]) -> FetchPlan:
        """A fetch into rows just reserved in state FETCHING."""
        plan = FetchPlan(self._next_id, mark, keys, locations)
        self._next_id += 1
        self._flying[plan.fetch_id] = plan
        self._held_rows += len(keys)
        for location in locations:
            self._fetch_of[location] = plan.fetch_id
        return plan

    def among(self, locations: Collection[int]) -> frozenset[int]:
        """Fetches that ``locations`` still wait for."""
        if not self._fetch_of:
            return frozenset()
        found = (self._fetch_of.get(location) for location in locations)
        return frozenset(fetch_id for fetch_id in found if fetch_id is not None)

    def is_at(self, location: int) -> bool:
        """Whether the bytes of ``location`` are on their way."""
        return location in self._fetch_of

    def is_flying(self, fetch_id: int) -> bool:
        return fetch_id in self._flying

    def commit(
        self, fetch_id: int, failed: Collection[int] = (), quarantined: bool = False
    ) -> FetchPlan | None:
        """The fetch has ended; ``failed`` are positions whose bytes did not arrive.

        With ``quarantined``, bytes of the failed positions may still land: their rows stay out of
        use until ``settle``. Returns the plan, or None if there is no such fetch.
        """
        plan = self._flying.pop(fetch_id, None)
        if plan is None:
            return None
        for location in plan.locations:
            del self._fetch_of[location]
        arrived = self._publish(plan, frozenset(failed))
        lost = [plan.locations[position] for position in failed]
        if quarantined:
            self._quarantined[fetch_id] = lost
        else:
            self._drop_pins(lost, 0)
        kept = FetchPlan(
            fetch_id,
            plan.mark,
            [plan.keys[position] for position in arrived],
            [plan.locations[position] for position in arrived],
        )
        if plan.held and arrived:
            self._kept[fetch_id] = kept
        else:
            self._give_back(kept)
        return plan

    def _publish(self, plan: FetchPlan, failed: Collection[int]) -> list[int]:
        """Make readable what arrived, forget the rest; positions of what arrived."""
        arrived = []
        for position, (key, location) in enumerate(zip(plan.keys, plan.locations, strict=True)):
            tier, row = self._index.rows_at(location), row_of(location)
            if position not in failed:
                arrived.append(position)
            if tier.state[row] != FETCHING:  # cleared meanwhile
                continue
            if position in failed:
                self._index.remove(key)
                continue
            tier.arrived(row)
            self._counters.fetched += 1
            self._index.on_change(key, True)
        return arrived

    def settle(self, fetch_id: int) -> None:
        """Nothing of a quarantined fetch can land any more."""
        self._drop_pins(self._quarantined.pop(fetch_id, []), 0)

    def release(self, fetch_id: int) -> None:
        """Its request has loaded the rows, or never will."""
        flying = self._flying.get(fetch_id)
        if flying is not None:
            flying.held = False
        kept = self._kept.pop(fetch_id, None)
        if kept is not None:
            self._give_back(kept)

    def _give_back(self, plan: FetchPlan) -> None:
        """Drop the pins tail first, so that the head is the newest."""
        order = tails_first(plan.keys)
        self._drop_pins([plan.locations[position] for position in order], plan.mark)

    def _drop_pins(self, locations: Sequence[int], mark: int) -> None:
        self._held_rows -= len(locations)
        self._index.unpin([location for location in locations if location != NOWHERE], mark)
