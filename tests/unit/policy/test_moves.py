"""Demotion and promotion: when, which, and that they end."""

from __future__ import annotations

import pytest
from policy_cache import Cache, prompt

from xinference_xavier.policy.index import Found
from xinference_xavier.policy.planner import default_low_water


def test_low_water_is_restored_by_demotion():
    cache = Cache(8, 8, low_water=3)
    cache.store(prompt(0, 8))
    cache.settle()
    assert cache.index.gpu.free == 3
    assert cache.tiers(prompt(0, 8)) == "GGGGGCCC"
    assert cache.counters.demotions == 3


def test_moves_in_flight_count_as_room_to_come():
    cache = Cache(8, 8, low_water=3)
    cache.store(prompt(0, 8))
    assert [len(plan.keys) for plan in cache.planner.plan_moves()] == [3]
    assert cache.planner.plan_moves() == []


def test_storing_request_does_not_demote_itself():
    cache = Cache(4, 4, low_water=2)
    cache.store(prompt(1, 1))
    mark = cache.mark()
    cache.store(prompt(0, 3), mark)
    cache.step(storing={mark})
    assert cache.tiers(prompt(1, 1) + prompt(0, 3)) == "CGGG"
    cache.step()
    assert cache.tiers(prompt(0, 3)) == "GGC"


def test_failed_demotion_leaves_the_snapshot_readable():
    cache = Cache(1, 1, low_water=1)
    cache.store(prompt(0, 1))
    before = cache.counters.as_dict()
    (plan,) = cache.planner.plan_moves()
    assert cache.index.lookup(prompt(0, 1)[0]) is Found.HIT
    cache.planner.commit_move(plan, ok=False)
    assert cache.tiers(prompt(0, 1)) == "G"
    assert cache.counters.as_dict() == before | {"failed_copies": 1}
    assert cache.index.cpu.free == 1


def test_pinned_source_stays_and_its_copy_is_dropped():
    cache = Cache(1, 1, low_water=1)
    cache.store(prompt(0, 1))
    (plan,) = cache.planner.plan_moves()
    load = cache.planner.pin_for_load(prompt(0, 1), cache.mark())
    cache.planner.commit_move(plan, ok=True)
    assert cache.tiers(prompt(0, 1)) == "G"
    assert (cache.counters.demotions, cache.counters.moves_dropped) == (0, 1)
    cache.planner.finish_load(load)
    assert cache.settle() == 1
    assert cache.tiers(prompt(0, 1)) == "C"


def test_demotion_keeps_neighbours_neighbours():
    cache = Cache(8, 8, low_water=4)
    cache.store(prompt(0, 8))
    (plan,) = cache.planner.plan_moves()
    pairs = sorted(
        (source, ~target) for source, target in zip(plan.sources, plan.targets, strict=True)
    )
    assert [target - source for source, target in pairs] == [pairs[0][1] - pairs[0][0]] * 4


def test_hit_in_the_cpu_tier_is_promoted_in_place_of_older_snapshots():
    cache = Cache(4, 8, low_water=1)
    cold, hot = prompt(0, 4), prompt(1, 3)
    cache.store(hot)
    cache.settle()
    cache.store(cold)
    cache.store(prompt(2, 3))
    cache.settle()
    assert "C" in cache.tiers(hot)
    cache.load(hot)
    cache.settle()
    assert cache.tiers(hot) == "GGG"
    assert cache.counters.promotions > 0
    assert cache.index.gpu.free >= 1


def test_snapshot_hit_in_the_gpu_tier_is_not_moved():
    cache = Cache(4, 4, low_water=1)
    cache.store(prompt(0, 3))
    cache.load(prompt(0, 3))
    assert cache.settle() == 0


def test_prompt_larger_than_the_gpu_tier_does_not_ping_pong():
    cache = Cache(8, 64, low_water=2)
    keys = prompt(0, 32)
    cache.store(keys)
    cache.settle()
    heads = cache.tiers(keys)
    for _ in range(10):
        cache.load(keys)
        assert cache.settle() == 0
    assert cache.tiers(keys) == heads == "G" * 6 + "C" * 26


def test_prompts_in_turns_move_at_most_the_gpu_tier_per_turn():
    gpu_rows = 8
    cache = Cache(gpu_rows, 64, low_water=2)
    prompts = [prompt(0, 20), prompt(1, 20)]
    for keys in prompts:
        cache.store(keys)
    cache.settle()
    for turn in range(10):
        cache.load(prompts[turn % 2])
        assert cache.settle() <= 2 * gpu_rows
    assert cache.tiers(prompts[1])[:4] == "GGGG", "the head of the last prompt is promoted"


def test_pinned_snapshot_is_not_promoted():
    cache = Cache(2, 4, low_water=1)
    keys = prompt(0, 2)
    cache.store(prompt(1, 2))
    cache.store(keys)
    cache.load(keys)
    load = cache.planner.pin_for_load(keys, cache.mark())
    assert cache.settle() == 2, "room is made"
    assert cache.tiers(keys) == "CC"
    cache.planner.finish_load(load)
    cache.settle()
    assert cache.tiers(keys) == "GC"


def test_promoted_tails_leave_before_heads():
    cache = Cache(8, 16, low_water=3)
    keys = prompt(0, 3)
    cache.store(prompt(1, 8))
    cache.store(keys)
    cache.load(keys)
    cache.settle()
    assert cache.tiers(keys) == "GGG"
    cache.planner.moves.low_water = 6
    cache.settle()
    assert cache.tiers(keys) == "GGC"


def test_room_for_a_promotion_is_not_made_by_dropping_what_was_just_hit():
    cache = Cache(4, 4, low_water=1)
    cache.store(prompt(1, 4))
    cache.store(prompt(0, 3))
    cache.load(prompt(0, 3))
    cache.settle()
    assert "-" not in cache.tiers(prompt(0, 3))
    assert cache.counters.evictions_cpu == 0


def test_snapshot_hit_by_many_requests_at_once_is_one_candidate():
    cache = Cache(64, 64, low_water=1)
    keys = prompt(0, 64)
    cache.planner.admit(prompt(1, 64), cache.mark(), set())  # in flight: no GPU row is free
    cache.store(keys)
    for _ in range(50):
        cache.load(keys)
    assert len(cache.planner.moves._candidates) == 64


def test_promotion_never_takes_the_reserve():
    cache = Cache(4, 8, low_water=2)
    cache.store(prompt(0, 8))
    cache.settle()
    load = cache.planner.pin_for_load(cache.index.keys(), cache.mark())
    cache.planner.finish_load(load)
    cache.settle()
    assert cache.index.gpu.free >= 2


@pytest.mark.parametrize(
    ("gpu_rows", "step_blocks", "low_water"),
    [(0, 64, 0), (1, 64, 1), (4, 64, 1), (100, 2, 5), (100, 10, 10), (100, 64, 25), (400, 64, 64)],
)
def test_default_low_water(gpu_rows, step_blocks, low_water):
    assert default_low_water(gpu_rows, step_blocks) == low_water
