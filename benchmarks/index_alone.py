"""The index and the planner alone, without copies: time per admitted block, looks per victim, and
bytes per entry.

The time is CPU time of this process, so that other load counts less; what it still costs is that
others use the same caches and memory.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc

from benchmarks.own_store import random_keys
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.order import LRUOrder, OrderFactory, order_factory
from xinference_xavier.policy.planner import Planner, default_low_water

BATCH = 64


class _CountedColumn:
    """An integer column that counts its reads."""

    def __init__(self, cells: object) -> None:
        self.cells, self.reads = cells, 0

    def __getitem__(self, row: int) -> int:
        self.reads += 1
        return self.cells[row]  # type: ignore[index]

    def __setitem__(self, row: int, value: int) -> None:
        self.cells[row] = value  # type: ignore[index]


class CountingOrder(LRUOrder):
    """LRU that counts the entries looked at in search of victims."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self._next = _CountedColumn(self._next)  # type: ignore[assignment]
        self.visits_max = 0.0

    def _count(self, before: int, rows: int) -> None:
        reads = self._next.reads - before  # type: ignore[attr-defined]
        self.visits_max = max(self.visits_max, reads / max(1, rows))

    def victim(self) -> int:
        before = self._next.reads  # type: ignore[attr-defined]
        row = super().victim()
        self._count(before, 1)
        return row

    def victims(self, count: int) -> list[int]:
        before = self._next.reads  # type: ignore[attr-defined]
        rows = super().victims(count)
        self._count(before, len(rows))
        return rows


def full_planner(gpu_rows: int, cpu_rows: int, order: OrderFactory) -> Planner:
    """Both tiers full, filled in the order of the rows."""
    index = SnapshotIndex(gpu_rows, cpu_rows, order)
    planner = Planner(index, default_low_water(gpu_rows, BATCH), (), BATCH)
    for first in range(0, gpu_rows + cpu_rows + 2 * BATCH, BATCH):
        admit(planner, random_keys(BATCH), first + 1)
    return planner


def admit(planner: Planner, keys: list[bytes], mark: int) -> None:
    """What the scheduler thread does for one store job and the moves that follow."""
    planner.commit_store(planner.admit(keys, mark, set()), ok=True)
    for plan in planner.plan_moves():
        planner.commit_move(plan, ok=True)


def admission_us(planner: Planner, blocks: int, mark: int) -> float:
    """CPU time per admitted block, in microseconds. ``mark`` is larger from call to call."""
    batches = [random_keys(BATCH) for _ in range(max(1, blocks // BATCH))]
    gc.collect()
    started = time.process_time()
    for number, keys in enumerate(batches):
        admit(planner, keys, (mark + 1) << 32 | number)
    return (time.process_time() - started) / (len(batches) * BATCH) * 1e6


def scatter(planner: Planner) -> None:
    """Use all snapshots once in random order, so that victims lie anywhere."""
    keys = list(planner.index.keys())
    random.Random(0).shuffle(keys)
    for key in keys:
        planner.index.touch(key, 0)


def measure(entries: int, blocks: int, rounds: int, policy: str) -> dict[str, list[float]]:
    """Admission times of ``rounds`` rounds: with eviction, with victims in scattered rows, and with
    demotion before it."""
    order = order_factory(policy)
    one = full_planner(0, entries, order)
    times = {"evict": [admission_us(one, blocks, mark) for mark in range(rounds)]}
    scatter(one)
    few = max(1, min(rounds, entries // (2 * blocks)))  # later victims lie in order again
    times["scattered"] = [admission_us(one, blocks, rounds + mark) for mark in range(few)]
    del one
    two = full_planner(entries // 5, entries - entries // 5, order)
    times["demote"] = [admission_us(two, blocks, mark) for mark in range(rounds)]
    return times


def victim_visits_max(entries: int, leases: int) -> float:
    """Most entries looked at for one victim, of batches and single blocks, in both tiers, with
    ``leases`` snapshots pinned at the front of each order."""
    planner = full_planner(entries // 5, entries - entries // 5, CountingOrder)
    for tier in (planner.index.gpu, planner.index.cpu):
        front = [tier.key[row] for row, _ in zip(tier.order, range(leases), strict=False)]
        planner.index.pin(front)
    for number in range(4 * BATCH):
        count = BATCH if number % 2 else 1
        admit(planner, random_keys(count), 1 << 40 | number)
    orders = (planner.index.gpu.order, planner.index.cpu.order)
    return max(order.visits_max for order in orders)  # type: ignore[attr-defined]


def entry_bytes(entries: int, policy: str) -> float:
    """Python memory per entry once the tiers were turned over twice and all has grown."""
    tracemalloc.start(1)
    planner = full_planner(entries // 5, entries - entries // 5, order_factory(policy))
    for first in range(0, 2 * entries, BATCH):
        admit(planner, random_keys(BATCH), first + (1 << 32))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / len(planner.index)
