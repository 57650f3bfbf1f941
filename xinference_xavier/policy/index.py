"""Where every key lies: one dictionary from key to location over two tiers' rows.

Covers lookup, pins and removal. Does not cover what is admitted or moved (``planner``). Runs on
vLLM's scheduler thread, the only one that changes the index: every removal and move happens after
the step's lookups have been redeemed, so a HIT is a promise that holds for its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from xinference_xavier.policy.order import LRUOrder, OrderFactory
from xinference_xavier.policy.tier import LEAVING, READY, WRITING, RowState, TierRows, check
from xinference_xavier.types import NOWHERE, Tier, row_of


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
        self._where: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def keys(self) -> Sequence[bytes]:
        """A copy of all keys, taken in one piece; other threads may call it."""
        return tuple(self._where)

    def tier(self, tier: Tier) -> TierRows:
        return self.gpu if tier is Tier.GPU else self.cpu

    def rows_at(self, location: int) -> TierRows:
        return self.gpu if location >= 0 else self.cpu

    def where(self, key: bytes) -> int:
        """The key's location, or ``NOWHERE``."""
        return self._where.get(key, NOWHERE)

    def lookup(self, key: bytes) -> Found:
        """Whether ``key`` can be read now."""
        location = self._where.get(key)
        if location is None:
            return Found.MISS
        if self.rows_at(location).state[row_of(location)] == WRITING:
            return Found.PENDING
        return Found.HIT

    def place(self, key: bytes, location: int) -> None:
        """Record a key's first or new location."""
        self._where[key] = location

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Pin each readable key's row; ``NOWHERE`` in the place of any other key."""
        locations = []
        for key in keys:
            location = NOWHERE
            if self.lookup(key) is Found.HIT:
                location = self._where[key]
                self.rows_at(location).pin(row_of(location))
            locations.append(location)
        return locations

    def unpin(self, locations: Sequence[int], mark: int) -> None:
        """Drop one pin each, last location first, so that a prefix's head is its newest part."""
        for location in reversed(locations):
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
        location = self._where.pop(key, None)
        if location is None:
            return
        self.rows_at(location).remove(row_of(location))

    def clear(self) -> int:
        """Forget every key; returns how many there were."""
        keys = self.keys()
        for key in keys:
            self.remove(key)
        return len(keys)

    def validate(self) -> None:
        """Raise ``IntegrityError`` unless index and rows agree. Walks everything: for tests."""
        self.gpu.validate("gpu")
        self.cpu.validate("cpu")
        holding = (WRITING, READY, LEAVING)
        for key, location in self._where.items():
            tier, row = self.rows_at(location), row_of(location)
            check(tier.key[row] == key, f"{key.hex()} is not what row {location} holds")
            check(
                tier.state[row] in holding,
                f"{key.hex()} lies in a row that is {RowState(tier.state[row]).name}",
            )
        rows = sum(tier.counts[state] for tier in (self.gpu, self.cpu) for state in holding)
        check(len(self._where) == rows, f"{len(self._where)} keys, {rows} rows that hold one")
