"""Which blocks are stored and where, with both tiers and with one of them off."""

from __future__ import annotations

from policy_cache import Cache, prompt

from xinference_xavier.policy.index import Found
from xinference_xavier.types import NOWHERE, SkipReason


def test_heads_go_to_gpu_rows_and_the_rest_to_cpu_rows():
    cache = Cache(3, 4)
    keys = prompt(0, 5)
    assert cache.store(keys) == keys
    assert cache.tiers(keys) == "GGGCC"
    assert (cache.counters.stored_gpu, cache.counters.stored_cpu) == (3, 2)


def test_block_is_pending_until_committed_and_gone_if_that_failed():
    cache = Cache(1, 1)
    keys = prompt(0, 2)
    plan = cache.planner.admit(keys, 1, set())
    assert {cache.index.lookup(key) for key in keys} == {Found.PENDING}
    assert cache.planner.pin_for_load(keys, 2).locations == [NOWHERE, NOWHERE]
    cache.planner.commit_store(plan, ok=False)
    assert cache.tiers(keys) == "--"
    assert cache.counters.as_dict() | {"failed_copies": 0} == Cache(1, 1).counters.as_dict()
    assert cache.counters.failed_copies == 1


def test_known_and_repeated_keys_are_stored_once():
    cache = Cache(0, 8)
    first, *_ = keys = prompt(0, 3)
    assert cache.store([first]) == [first]
    assert cache.store([*keys, *keys]) == keys[1:]
    assert cache.index.cpu.free == 5


def test_prompt_larger_than_the_tier_keeps_its_head():
    cache = Cache(0, 4)
    keys, broken = prompt(0, 6), set()
    assert cache.store(keys[:3], 1, broken) == keys[:3]
    assert cache.store(keys[3:], 1, broken) == keys[3:4]
    assert cache.tiers(keys) == "CCCC--"
    assert cache.skips() == {
        SkipReason.PROMPT_EXCEEDS_TIER.value: 1,
        SkipReason.PREFIX_NOT_STORED.value: 1,
    }


def test_prompt_larger_than_the_tier_in_one_piece_says_so():
    cache = Cache(0, 4)
    cache.store(prompt(1, 4))
    assert cache.tiers(cache.store(prompt(0, 6))) == "CCCC"
    assert SkipReason.PROMPT_EXCEEDS_TIER.value in cache.skips()
    assert SkipReason.NO_EVICTABLE_ROW.value not in cache.skips()


def test_pinned_rows_are_no_room():
    cache = Cache(0, 4)
    old = prompt(0, 4)
    cache.store(old)
    load = cache.planner.pin_for_load(old, cache.mark())
    assert cache.store(prompt(1, 2)) == []
    assert cache.skips() == {
        SkipReason.NO_EVICTABLE_ROW.value: 1,
        SkipReason.PREFIX_NOT_STORED.value: 1,
    }
    cache.planner.finish_load(load)
    assert cache.store(prompt(1, 2)) == prompt(1, 2)


def test_request_does_not_evict_the_prefix_it_shares():
    """The prefix is old and known: the engine computed it from its own cache, without a load."""
    cache = Cache(0, 4)
    keys = prompt(0, 4)
    cache.store(keys[:2])
    cache.store(prompt(1, 2))
    cache.store(keys)
    assert cache.tiers(keys) == "CCCC"
    assert cache.tiers(prompt(1, 2)) == "--"


def test_request_does_not_evict_a_prefix_that_a_younger_one_used():
    cache = Cache(0, 3)
    keys = prompt(0, 4)
    older, younger = cache.mark(), cache.mark()
    cache.store(keys[:3], younger)
    assert cache.store(keys, older) == []
    assert cache.tiers(keys) == "CCC-"


def test_later_chunk_does_not_evict_an_earlier_one():
    cache = Cache(0, 4)
    shared, mark = prompt(0, 2), 99
    cache.store(shared)
    cache.store(prompt(1, 2))
    cache.store(shared, mark)
    cache.store(prompt(0, 4)[2:], mark)
    assert cache.tiers(prompt(0, 4)) == "CCCC"


def test_hole_ends_one_group_and_leaves_the_others_alone():
    cache = Cache(0, 3)
    group_0, group_1 = prompt(0, 3), prompt(0, 4, group=1)
    broken: set[int] = set()
    cache.store(group_0[:1] + group_1[:3], 1, broken)
    assert cache.tiers(group_0[:1] + group_1) == "CCC--"
    assert broken == {1}
    cache.planner.clear()
    assert cache.store(group_0[1:] + group_1[3:], 1, broken) == group_0[1:]
    assert cache.skips()[SkipReason.PREFIX_NOT_STORED.value] == 1


def test_window_group_may_have_holes():
    cache = Cache(0, 2, windows=(1,))
    keys, broken = prompt(0, 4, group=1), set()
    cache.store(keys[:3], 1, broken)
    assert broken == set()
    cache.planner.clear()
    assert cache.store(keys[3:], 1, broken) == keys[3:]


def test_without_gpu_tier_everything_lies_in_the_cpu_tier():
    cache = Cache(0, 3)
    cache.store(prompt(0, 3))
    cache.load(prompt(0, 3))
    assert cache.settle() == 0
    cache.store(prompt(1, 2))
    assert cache.tiers(prompt(0, 3) + prompt(1, 2)) == "C--CC"
    assert cache.counters.evictions_cpu == 2


def test_without_cpu_tier_gpu_snapshots_are_dropped():
    cache = Cache(3, 0, low_water=1)
    cache.store(prompt(0, 3))
    assert cache.settle() == 0
    cache.store(prompt(1, 2))
    assert cache.tiers(prompt(0, 3) + prompt(1, 2)) == "G--GG"
    assert cache.counters.evictions_gpu == 2
