"""What counts as a use, what is forgotten, and what a clear leaves to the jobs in flight."""

from __future__ import annotations

from policy_cache import Cache, prompt

from xinference_xavier.policy.planner import RETIRED_REQUESTS, TOUCHES_PER_STEP
from xinference_xavier.types import Tier, tier_of


def test_tails_leave_before_heads_within_a_chunk():
    cache = Cache(0, 4)
    cache.store(prompt(0, 4))
    cache.store(prompt(1, 2))
    assert cache.tiers(prompt(0, 4)) == "CC--"


def test_tails_leave_before_heads_over_chunks_once_the_request_ended():
    cache = Cache(0, 4)
    keys, mark = prompt(0, 4), cache.mark()
    for key in keys:
        cache.store([key], mark)
    cache.planner.retire(keys, mark)
    cache.step()
    for left in ("CCC-", "CC--", "C---"):
        cache.store(prompt(left.count("-"), 1))
        assert cache.tiers(keys) == left


def test_tails_leave_the_gpu_tier_first_and_stay_older_in_the_cpu_tier():
    cache = Cache(4, 4)
    keys = prompt(0, 4)
    cache.store(keys)
    cache.planner.moves.low_water = 2
    cache.settle()
    assert cache.tiers(keys) == "GGCC"
    cache.store(prompt(1, 5))  # two free rows each, and the oldest of the CPU tier
    assert cache.tiers(keys) == "GGC-"


def test_tails_leave_before_heads_over_kv_groups():
    keys = prompt(0, 2) + prompt(0, 2, group=1)
    cache = Cache(0, 4)
    cache.store(keys)
    cache.store(prompt(1, 2))
    assert cache.tiers(keys) == "C-C-"
    cache = Cache(0, 4)
    for key in keys:
        cache.store([key])
    cache.load(keys)
    cache.store(prompt(1, 2))
    assert cache.tiers(keys) == "C-C-"


def test_load_counts_as_use():
    cache = Cache(0, 4)
    cache.store(prompt(0, 2))
    cache.store(prompt(1, 2))
    cache.load(prompt(0, 2))
    cache.store(prompt(2, 2))
    assert cache.tiers(prompt(0, 2) + prompt(1, 2)) == "CC--"


def test_uses_of_ended_requests_are_counted_a_slice_per_step():
    rows = TOUCHES_PER_STEP + 2
    cache = Cache(0, rows)
    keys, mark = prompt(0, rows), cache.mark()
    for key in keys:
        cache.store([key], mark)
    cache.planner.retire(keys, mark)
    cache.step()
    assert cache.index.cpu.key[cache.index.cpu.order.victim()] == keys[0], "not reached yet"
    cache.step()
    assert cache.index.cpu.key[cache.index.cpu.order.victim()] == keys[-1]


def test_uses_of_ended_requests_do_not_pile_up():
    cache = Cache(0, 1)
    for mark in range(RETIRED_REQUESTS * 2):
        cache.planner.retire(prompt(0, 1), mark)
    assert len(cache.planner._touches) == RETIRED_REQUESTS


def test_failed_position_is_forgotten_and_the_others_stay():
    cache = Cache(0, 4)
    keys = prompt(0, 3)
    cache.store(keys)
    plan = cache.planner.pin_for_load(keys, cache.mark())
    assert [tier_of(location) for location in plan.locations] == [Tier.CPU] * 3
    cache.planner.finish_load(plan, failed=[1])
    assert cache.tiers(keys) == "C-C"
    assert cache.counters.failed_copies == 1
    assert cache.index.cpu.free == 2


def test_failed_position_does_not_take_a_newer_copy_with_it():
    cache = Cache(1, 1)
    keys = prompt(0, 1)
    cache.store(keys)
    plan = cache.planner.pin_for_load(keys, cache.mark())
    cache.planner.clear()
    cache.store(keys)
    cache.planner.finish_load(plan, failed=[0])
    assert cache.tiers(keys) == "C"


def test_clear_forgets_what_was_to_be_promoted_or_counted():
    cache = Cache(2, 8, low_water=1)
    keys = prompt(0, 4)
    cache.store(keys)
    cache.load(keys)
    cache.planner.retire(keys, 1)
    cache.planner.clear()
    cache.store(prompt(1, 2), mark=1)
    cache.store(keys[:1])
    cache.store(keys[1:])
    oldest = cache.index.cpu.order.victim()
    cache.settle()
    assert cache.counters.promotions == 0
    assert cache.index.cpu.order.victim() == oldest


def test_clear_keeps_rows_from_reuse_until_their_jobs_end():
    cache = Cache(4, 8, low_water=1)
    cache.store(prompt(0, 4))
    (demotion,) = cache.planner.plan_moves()
    load = cache.planner.pin_for_load(prompt(0, 4)[:1], cache.mark())
    store = cache.planner.admit(prompt(1, 2), cache.mark(), set())
    assert cache.planner.clear() == 6
    cache.index.validate()
    assert len(cache.index) == 0
    assert (cache.index.gpu.free, cache.index.cpu.free) == (2, 5)
    used = {*load.locations, *store.locations, *demotion.sources, *demotion.targets}
    again = cache.planner.admit(prompt(2, 12), cache.mark(), set())
    assert not used & set(again.locations)
    cache.planner.commit_store(store, ok=True)
    cache.planner.commit_move(demotion, ok=True)
    cache.planner.finish_load(load)
    cache.planner.commit_store(again, ok=True)
    cache.index.validate()
    assert set(cache.index.keys()) == set(again.keys)
    assert cache.index.gpu.free + cache.index.gpu.snapshots == 4
    assert cache.index.cpu.free + cache.index.cpu.snapshots == 8
