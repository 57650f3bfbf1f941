"""Tiers that change their size, clears and pauses: what stays, what goes, and in which steps."""

from __future__ import annotations

import pytest
from policy_cache import Cache, prompt
from policy_model import ReferenceOrder

from xinference_xavier.policy.columns import ZOMBIE
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.moves import CANDIDATES_PER_STEP
from xinference_xavier.policy.order import LRUOrder
from xinference_xavier.policy.planner import Planner
from xinference_xavier.policy.resize import ROWS_PER_STEP
from xinference_xavier.types import Tier


def resize(cache: Cache, tier: Tier, rows: int) -> int:
    """Change a tier and step until it is done; how many steps that took."""
    cache.planner.resizer.set_rows(tier, rows)
    steps = 0
    while cache.planner.resizer.shrinking:
        cache.step()
        steps += 1
        assert steps < 1000
    held = cache.planner.resizer.rows_of(tier)
    assert len(held.state) == held.rows == rows
    return steps


def test_what_was_used_last_stays_in_a_smaller_tier() -> None:
    cache = Cache(gpu=0, cpu=12)
    for number in range(4):
        cache.store(prompt(number, 3))
    cache.load(prompt(0, 3))
    resize(cache, Tier.CPU, 6)
    assert [cache.tiers(prompt(n, 3)) for n in range(4)] == ["CCC", "---", "---", "CCC"]
    assert cache.counters.evictions_cpu == 6


def test_a_gpu_tier_that_shrinks_demotes_its_oldest() -> None:
    cache = Cache(gpu=8, cpu=8)
    for number in range(4):
        cache.store(prompt(number, 2))
    resize(cache, Tier.GPU, 4)
    tiers = [cache.tiers(prompt(n, 2)) for n in range(4)]
    assert tiers[:2] == ["CC", "CC"]
    assert "".join(tiers).count("G") >= 3
    assert "-" not in "".join(tiers)
    assert cache.counters.evictions_gpu == cache.counters.evictions_cpu == 0


def test_pinned_rows_hold_a_tier_up_and_nothing_else() -> None:
    cache = Cache(gpu=4, cpu=0)
    keys = prompt(1, 4)
    cache.store(keys)
    pinned = cache.index.pin(keys[-1:])
    row = pinned[0]
    assert row == 3
    cache.planner.resizer.set_rows(Tier.GPU, 2)
    for _ in range(5):
        cache.step()
    assert cache.planner.resizer.shrinking == {Tier.GPU}
    assert cache.tiers(keys)[-1] == "G"
    assert cache.store(prompt(2, 1)), "others are stored meanwhile"
    cache.index.unpin(pinned, 9)
    for _ in range(5):
        cache.step()
    assert not cache.planner.resizer.shrinking
    assert cache.index.gpu.rows == 2


@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_tiers_go_and_come_back(rows: int) -> None:
    cache = Cache(gpu=10, cpu=20)
    for number in range(8):
        cache.store(prompt(number, 3))
        cache.step()
    resize(cache, Tier.CPU, rows)
    resize(cache, Tier.GPU, 0)
    resize(cache, Tier.CPU, 30)
    resize(cache, Tier.GPU, 25)
    for number in range(20, 30):
        assert len(cache.store(prompt(number, 3))) == 3
        cache.step()
    assert cache.skips() == {}


def test_a_large_tier_shrinks_in_bounded_steps() -> None:
    rows = 5 * ROWS_PER_STEP
    cache = Cache(gpu=0, cpu=rows)
    held = 3 * CANDIDATES_PER_STEP
    keys = prompt(1, held)
    cache.store(keys)
    cache.planner.resizer.set_rows(Tier.CPU, held - 2 * CANDIDATES_PER_STEP)
    evicted = []
    while cache.planner.resizer.shrinking:
        before = cache.counters.evictions_cpu
        cache.planner.plan_moves()
        evicted.append(cache.counters.evictions_cpu - before)
    assert max(evicted) == CANDIDATES_PER_STEP
    assert len(evicted) >= 5
    cache.index.validate()


@pytest.mark.parametrize("order", [LRUOrder, ReferenceOrder])
def test_an_order_is_kept_when_its_tier_grows(order: type) -> None:
    index = SnapshotIndex(0, 4, order)
    planner = Planner(index, 0)
    keys = prompt(1, 4)
    planner.commit_store(planner.admit(keys, 1, set()), ok=True)
    before = list(index.cpu.order)
    planner.resizer.set_rows(Tier.CPU, 9)
    assert list(index.cpu.order) == before
    index.validate()


def test_a_clear_frees_what_nobody_uses_at_once() -> None:
    cache = Cache(gpu=6, cpu=2000)
    keys = prompt(1, 1000)
    cache.store(keys)
    pinned = cache.index.pin(keys[:2] + keys[500:502])
    assert cache.planner.clear() == 1000
    assert cache.index.gpu.counts[ZOMBIE] + cache.index.cpu.counts[ZOMBIE] == 4
    assert cache.index.gpu.free + cache.index.cpu.free == 2002
    cache.index.validate()
    others = prompt(2, 1500)
    assert cache.store(others) == others, "around the rows that are still in use"
    cache.index.unpin(pinned, 9)
    cache.index.validate()
    assert cache.index.gpu.free + cache.index.cpu.free == 2006 - 1500
    assert cache.index.tidy(10_000_000) is False
    assert cache.index._litter == []


def test_the_memory_of_cleared_keys_is_freed_in_pieces() -> None:
    cache = Cache(gpu=0, cpu=10_000)
    cache.store(prompt(1, 10_000))
    cache.planner.clear()
    pieces = 1
    while cache.index.tidy(500):
        pieces += 1
    assert 15 <= pieces <= 60


def test_a_pause_counts_and_later_blocks_of_a_request_stay_out() -> None:
    cache = Cache(gpu=10, cpu=0)
    broken: set[int] = set()
    cache.planner.paused = True
    assert cache.store(prompt(1, 2), mark=7, broken=broken) == []
    cache.planner.paused = False
    assert cache.store(prompt(1, 4)[2:], mark=7, broken=broken) == []
    assert cache.skips() == {"paused": 2, "prefix_not_stored": 2}
    assert len(cache.store(prompt(1, 4))) == 4, "another request stores them"
