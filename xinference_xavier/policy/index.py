"""Where every key lies: one map from key to location over two tiers' rows.

Covers lookup, pins and removal. Does not cover what is admitted or moved (``planner``). Runs on
vLLM's scheduler thread, the only one that changes the index: every removal and move happens after
the step's lookups have been redeemed, so a HIT is a promise that holds for its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

from xinference_xavier.policy.columns import FETCHING, LEAVING, READY, WRITING, RowState, check
from xinference_xavier.policy.ghosts import Ghosts
from xinference_xavier.policy.history import COPY, UseHistory
from xinference_xavier.policy.keymap import KeyMap
from xinference_xavier.policy.order import NO_ROW, LRUOrder, OrderFactory
from xinference_xavier.policy.tier import TierRows
from xinference_xavier.types import NOWHERE, host_location, row_of


class Found(IntEnum):
    """Answer of a lookup."""

    MISS = 0
    #: Known, not yet written by every rank.
    PENDING = 1
    HIT = 2


#: An access to a member of an enum costs as much as the rest of a lookup.
_MISS, _PENDING, _HIT = Found


class SnapshotIndex:
    """Keys to locations, and the rows of both tiers."""

    def __init__(self, gpu_rows: int, cpu_rows: int, order: OrderFactory = LRUOrder) -> None:
        self.gpu = TierRows(gpu_rows, order)
        self.cpu = TierRows(cpu_rows, order)
        self._where = KeyMap(gpu_rows + cpu_rows)
        #: What was evicted, to see what comes back.
        self.ghosts = Ghosts(gpu_rows + cpu_rows)
        #: Uses of keys that come and go; None unless the order goes by them.
        self.history: UseHistory | None = None
        if getattr(self.gpu.order, "counts_uses", False):
            self.history = UseHistory(gpu_rows + cpu_rows)
            self.gpu.history = self.cpu.history = self.history
        #: Whether another replica seems to hold a key: what it holds as well goes before the last
        #: copy of anything. None while nobody shares. Called for copies that are to be dropped.
        self.held_elsewhere: Callable[[bytes], bool] | None = None
        #: Told of each key that became readable (True) or was forgotten (False), and of a clear:
        #: what peers know of this replica follows from it.
        self.on_change: Callable[[bytes, bool], None] = _ignore_change
        self.on_clear: Callable[[], None] = _ignore_clear
        #: Whether a row that is still being fetched is a HIT: its load waits for the bytes.
        self.hit_while_fetching = False
        #: What a clear left behind: lists of keys and of parts of the map.
        self._litter: list[list] = []

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def keys(self) -> Sequence[bytes]:
        """A copy of all keys; other threads may call it."""
        return self._where.keys()

    def rows_at(self, location: int) -> TierRows:
        return self.gpu if location >= 0 else self.cpu

    def where(self, key: bytes) -> int:
        """The key's location, or ``NOWHERE``."""
        location = self._where.get(key)
        return NOWHERE if location is None else location

    def lookup(self, key: bytes) -> Found:
        """Whether ``key`` can be read now."""
        shards = self._where.shards
        location = shards[hash(key) % len(shards)].get(key)
        if location is None:
            return _MISS
        state = self.gpu.state[location] if location >= 0 else self.cpu.state[~location]
        if state == WRITING or (state == FETCHING and not self.hit_while_fetching):
            return _PENDING
        return _HIT

    def split(self, keys: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Keys that are not here, and keys that are, both in order and once."""
        shards, count = self._where.shards, len(self._where.shards)
        once = dict.fromkeys(keys)
        missing = [key for key in once if key not in shards[hash(key) % count]]
        if len(missing) == len(once):
            return missing, []
        gone = frozenset(missing)
        return missing, [key for key in once if key not in gone]

    def reserve(
        self, tier: TierRows, keys: Sequence[bytes], mark: int, state: int = WRITING
    ) -> list[int]:
        """Take a free row of ``tier`` for each new key; returns their locations.

        ``tier`` must have that many free rows.
        """
        rows = tier.take(len(keys))
        tier.reserve(rows, keys, state, mark)
        if self.history is not None:
            copy = COPY if state == FETCHING and self.held_elsewhere is not None else 0
            for row, uses in zip(rows, self.history.admit(keys), strict=True):
                tier.uses[row] = uses | copy
        locations = rows if tier is self.gpu else [host_location(row) for row in rows]
        self._where.update(keys, locations)
        return locations

    def place(self, key: bytes, location: int) -> None:
        """Record a key's new location."""
        self._where[key] = location

    def evict(self, tier: TierRows, row: int) -> None:
        """Forget the snapshot in an evictable row of ``tier``."""
        tier.order.discard(row)
        self.evict_taken(tier, (row,))

    def evict_taken(self, tier: TierRows, rows: Sequence[int]) -> None:
        """Forget the snapshots in evictable rows that were taken from the order of ``tier``."""
        shards = self._where.shards
        count, changed = len(shards), self.on_change
        keys = tier.drop_taken(rows)
        for key in keys:
            del shards[hash(key) % count][key]
            changed(key, False)
        self.ghosts.evict(keys)

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Pin each readable key's row; ``NOWHERE`` in the place of any other key."""
        locations = []
        for key in keys:
            location = self.where(key) if self.lookup(key) is Found.HIT else NOWHERE
            if location != NOWHERE:
                self.rows_at(location).pin(row_of(location))
            locations.append(location)
        return locations

    def unpin(self, locations: Sequence[int], mark: int) -> None:
        """Drop one pin each, in order: the last one is the newest use."""
        for location in locations:
            if location == NOWHERE:
                continue
            tier, row = self.rows_at(location), row_of(location)
            tier.count_use(row, mark)
            tier.unpin(row)

    def count_peer_uses(self, locations: Sequence[int]) -> None:
        """A peer has read these rows, which are pinned."""
        if self.history is not None:
            for location in locations:
                self.rows_at(location).count(row_of(location))

    def victim(self, tier: TierRows, mark: int = -1) -> int:
        """The next row to evict from ``tier``, or ``NO_ROW``; a last copy takes its later turn, and
        copies that request ``mark`` has just used make no room for itself.

        A peer is asked about a row once after each fetch of it: constant time per block.
        """
        row = tier.order.victim()
        if self.held_elsewhere is None:
            return row
        while row != NO_ROW and tier.is_copy(row):
            if tier.mark[row] == mark:
                return tier.victim_but_copies()
            if self.held_elsewhere(tier.key[row]):
                return row
            tier.keep(row)
            row = tier.order.victim()
        return row

    def touch(self, key: bytes, mark: int) -> None:
        """Count a use of ``key`` by request ``mark``, if it is here."""
        location = self._where.get(key)
        if location is not None:
            self.rows_at(location).touch(row_of(location), mark)

    def remove(self, key: bytes) -> None:
        """Forget ``key``; its row is free at once or when the jobs that hold it have ended."""
        location = self._where.pop(key)
        if location is None:
            return
        self.rows_at(location).remove(row_of(location))
        self.on_change(key, False)

    def clear(self) -> int:
        """Forget every key; returns how many there were. Its memory is freed by ``tidy``."""
        count = len(self._where)
        self._litter += [self.gpu.clear(), self.cpu.clear(), self._where.clear()]
        self.ghosts.clear()
        if self.history is not None:
            self.history.clear()
        self.on_clear()
        return count

    def tidy(self, keys: int) -> bool:
        """Free the memory of up to about ``keys`` forgotten keys; whether more is left.

        A million of them in one go would take a tenth of a second.
        """
        while self._litter and keys > 0:
            heap = self._litter[-1]
            last = heap[-1] if heap else b""
            many = len(last) if isinstance(last, dict) else 1
            count = max(1, keys // max(1, many))
            keys -= min(count, len(heap)) * max(1, many)
            del last, heap[-count:]
            if not heap:
                self._litter.pop()
        return bool(self._litter)

    def validate(self) -> None:
        """Raise ``IntegrityError`` unless index and rows agree. Walks everything: for tests."""
        self.gpu.validate("gpu")
        self.cpu.validate("cpu")
        holding = (WRITING, READY, LEAVING, FETCHING)
        for key, location in self._where.items():
            tier, row = self.rows_at(location), row_of(location)
            check(tier.key[row] == key, f"{key.hex()} is not what row {location} holds")
            check(
                tier.state[row] in holding,
                f"{key.hex()} lies in a row that is {RowState(tier.state[row]).name}",
            )
        rows = sum(tier.counts[state] for tier in (self.gpu, self.cpu) for state in holding)
        check(len(self._where) == rows, f"{len(self._where)} keys, {rows} rows that hold one")


def _ignore_change(key: bytes, readable: bool) -> None:
    """Nobody wants to know."""


def _ignore_clear() -> None:
    """Nobody wants to know."""
