"""The search for victims does not walk: one entry is looked at for each, whatever is held.

The list's link cells are replaced by columns that count reads, so what is counted is every look at
an entry, not calls that could hide a walk.
"""

from __future__ import annotations

import pytest

from xinference_xavier.policy.index import Found, SnapshotIndex
from xinference_xavier.policy.order import LRUOrder
from xinference_xavier.policy.planner import Planner

ROWS = 10_000
PINS = 64
NEW = 500


class CountedColumn:
    """An integer column that counts how often a cell is read."""

    def __init__(self, cells) -> None:
        self.cells = cells
        self.reads = 0

    def __getitem__(self, row: int) -> int:
        self.reads += 1
        return self.cells[row]

    def __setitem__(self, row: int, value: int) -> None:
        self.cells[row] = value


class CountingOrder(LRUOrder):
    """Counts searches, entries looked at by them, and all reads of links."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self._next = CountedColumn(self._next)
        self._prev = CountedColumn(self._prev)
        self.searches = self.visits = 0

    def links_read(self) -> int:
        return self._next.reads + self._prev.reads

    def victim(self) -> int:
        before = self.links_read()
        row = super().victim()
        self.searches += 1
        self.visits += self.links_read() - before
        return row

    def victims(self, count: int) -> list[int]:
        before = self.links_read()
        rows = super().victims(count)
        self.searches += len(rows)
        self.visits += self.links_read() - before
        return rows


def keys(start: int, count: int) -> list[bytes]:
    return [i.to_bytes(32, "big") + bytes(4) for i in range(start, start + count)]


def filled(gpu_rows: int, cpu_rows: int, pinned: slice, low_water: int = 0) -> Planner:
    """A full cache with ``PINS`` loads in flight, on the oldest entries or elsewhere."""
    planner = Planner(SnapshotIndex(gpu_rows, cpu_rows, CountingOrder), low_water)
    for mark, key in enumerate(keys(0, gpu_rows + cpu_rows), start=1):
        planner.commit_store(planner.admit([key], mark, set()), ok=True)
    tier = planner.index.cpu if cpu_rows else planner.index.gpu
    held = [tier.key[row] for row in tier.order][pinned]
    assert len(held) == PINS
    planner.pin_for_load(held, mark=ROWS * 2)
    return planner


FRONT, MIDDLE, BACK = slice(0, PINS), slice(5000, 5000 + PINS), slice(-PINS, None)


@pytest.mark.parametrize("pinned", [FRONT, MIDDLE, BACK])
def test_eviction_looks_at_one_entry_per_victim(pinned):
    planner = filled(0, ROWS, pinned)
    order, oldest = planner.index.cpu.order, [*planner.index.cpu.order]
    expected = [planner.index.cpu.key[row] for row in oldest[:NEW]]
    before = order.links_read()
    for mark in range(NEW // 10):
        planner.admit(keys(ROWS * 5 + mark * 10, 10), ROWS * 3 + mark, set())
    assert planner.counters.evictions_cpu == NEW
    assert (order.searches, order.visits) == (NEW, NEW)
    # One of each victim, and of each batch one to unlink it.
    assert order.links_read() - before == NEW + NEW // 10
    assert {planner.index.lookup(key) for key in expected} == {Found.MISS}


@pytest.mark.parametrize("pinned", [FRONT, MIDDLE, BACK])
def test_demotion_looks_at_one_entry_per_victim_and_tier(pinned):
    planner = filled(NEW * 2, ROWS, pinned)
    planner.moves.low_water = NEW
    gpu, cpu = planner.index.gpu.order, planner.index.cpu.order
    before = gpu.links_read(), cpu.links_read()
    (plan,) = planner.plan_moves()
    assert len(plan.keys) == planner.counters.evictions_cpu == NEW
    assert (gpu.searches, gpu.visits, cpu.searches, cpu.visits) == (NEW,) * 4
    assert gpu.links_read() - before[0] == 3 * NEW
    assert cpu.links_read() - before[1] == 3 * NEW


@pytest.mark.parametrize("pinned", [FRONT, BACK])
def test_gpu_tier_alone_evicts_by_one_look(pinned):
    planner = filled(ROWS, 0, pinned)
    order = planner.index.gpu.order
    plan = planner.admit(keys(ROWS * 5, NEW), ROWS * 3, set())
    assert len(plan.keys) == planner.counters.evictions_gpu == NEW
    assert (order.searches, order.visits) == (NEW, NEW)


def test_nothing_evictable_is_known_without_a_look():
    planner = filled(0, PINS, FRONT)
    order = planner.index.cpu.order
    assert planner.admit(keys(ROWS * 5, NEW), ROWS * 3, set()).keys == []
    assert (order.searches, order.visits) == (0, 0)
