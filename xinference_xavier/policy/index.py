"""Where every key lies: one map from key to location over two tiers' rows.

Covers lookup, pins and removal. Does not cover what is admitted or moved (``planner``). Runs on
vLLM's scheduler thread, the only one that changes the index: every removal and move happens after
the step's lookups have been redeemed, so a HIT is a promise that holds for its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from xinference_xavier.policy.keymap import KeyMap
from xinference_xavier.policy.order import LRUOrder, OrderFactory
from xinference_xavier.policy.tier import (
    FETCHING,
    LEAVING,
    READY,
    WRITING,
    RowState,
    TierRows,
    check,
)
from xinference_xavier.types import NOWHERE, host_location, row_of


class Found(Enum):
    """Answer of a lookup."""

    MISS = 0
    #: Known, not yet written by every rank.
    PENDING = 1
    HIT = 2


class SnapshotIndex:
    """Keys to locations, and the rows of both tiers."""

    def __init__(self, gpu_rows: int, cpu_rows: int, order: OrderFactory = LRUOrder) -> None:
        self.gpu = TierRows(gpu_rows, order)
        self.cpu = TierRows(cpu_rows, order)
        self._where = KeyMap(gpu_rows + cpu_rows)
        #: Told of each key that became readable (True) or was forgotten (False), and of a clear:
        #: what peers know of this replica follows from it.
        self.on_change: Callable[[bytes, bool], None] = _ignore_change
        self.on_clear: Callable[[], None] = _ignore_clear
        #: Whether a row that is still being fetched is a HIT: its load waits for the bytes.
        self.hit_while_fetching = False

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
        location = self._where.get(key)
        if location is None:
            return Found.MISS
        state = self.gpu.state[location] if location >= 0 else self.cpu.state[~location]
        if state == WRITING or (state == FETCHING and not self.hit_while_fetching):
            return Found.PENDING
        return Found.HIT

    def split(self, keys: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Keys that are not here, and keys that are, both in order and once."""
        shards, count = self._where.shards, len(self._where.shards)
        missing: list[bytes] = []
        known: list[bytes] = []
        for key in dict.fromkeys(keys):
            (known if key in shards[hash(key) % count] else missing).append(key)
        return missing, known

    def reserve(
        self, tier: TierRows, keys: Sequence[bytes], mark: int, state: int = WRITING
    ) -> list[int]:
        """Take a free row of ``tier`` for each new key; returns their locations.

        ``tier`` must have that many free rows.
        """
        rows = tier.take(len(keys))
        tier.reserve(rows, keys, state, mark)
        locations = rows if tier is self.gpu else [host_location(row) for row in rows]
        self._where.update(keys, locations)
        return locations

    def place(self, key: bytes, location: int) -> None:
        """Record a key's new location."""
        self._where[key] = location

    def evict(self, tier: TierRows, row: int) -> None:
        """Forget the snapshot in an evictable row of ``tier``."""
        key, shards = tier.key[row], self._where.shards
        del shards[hash(key) % len(shards)][key]
        tier.drop(row)
        self.on_change(key, False)

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
            tier.mark[row] = max(tier.mark[row], mark)
            tier.unpin(row)

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
        """Forget every key; returns how many there were."""
        count = len(self._where)
        self._where.clear()
        self.gpu.clear()
        self.cpu.clear()
        self.on_clear()
        return count

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
