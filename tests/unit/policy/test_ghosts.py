"""Evictions that come back, against an LRU of the size that the counts claim would do."""

from __future__ import annotations

import random

import pytest
from policy_cache import Cache
from policy_model import key_of

from xinference_xavier.policy.ghosts import MOST_FOLLOWED, PERCENTS, SLOT_BITS, Ghosts


def keys_apart(count: int) -> list[bytes]:
    """Keys of which none displaces another, whatever the process hashes them to."""
    found: dict[int, bytes] = {}
    for number in range(2**SLOT_BITS):
        found.setdefault(hash(key_of(0, number)) % 2**SLOT_BITS, key_of(0, number))
    assert len(found) >= count
    return list(found.values())[:count]


def computed_again(gpu: int, cpu: int, rounds: int, working_set: int) -> tuple[Cache, int]:
    """Go round ``working_set`` blocks one by one; how many were computed after the first round."""
    cache, computed = Cache(gpu, cpu), 0
    keys = keys_apart(working_set)
    for number in range(rounds * working_set):
        key = keys[number % working_set]
        if key in cache.index:
            cache.load([key])
        else:
            cache.store([key])
            computed += 1
        cache.settle()
    return cache, computed - working_set


@pytest.mark.parametrize(("gpu", "cpu"), [(8, 0), (4, 8)], ids=["one tier", "two tiers"])
def test_a_cycle_just_beyond_the_tier_comes_back_within_a_quarter(gpu: int, cpu: int) -> None:
    rows = gpu + cpu
    cache, again = computed_again(gpu, cpu, rounds=5, working_set=rows + 2)
    counts = cache.index.ghosts.as_dict()
    assert again > 0
    assert counts["returned_25"] == again
    assert counts["evicted"] == cache.counters.evictions_gpu + cache.counters.evictions_cpu
    _, with_two_more_rows = computed_again(gpu, cpu + 2 if cpu else 0, 5, rows + 2)
    if cpu:
        assert with_two_more_rows == 0  # the room that the counts named was enough


def test_the_room_that_was_missing_decides_the_counter() -> None:
    ghosts = Ghosts(100)
    assert ghosts.weight == 1
    every = keys_apart(sum(PERCENTS) + 402)
    for percent in PERCENTS:
        keys = [every.pop() for _ in range(percent)]
        for key in keys:
            ghosts.evict([key])
        ghosts.admit(keys[:1], rows=100)
        assert ghosts.as_dict()[f"returned_{percent}"] == 1
        ghosts.admit(keys[:1], rows=100)  # counted once
    first = every.pop()
    ghosts.evict([first])
    for key in every:
        ghosts.evict([key])
    ghosts.admit([first], rows=100)
    assert ghosts.as_dict()["returned_beyond"] == 1
    assert sum(ghosts.returned) == len(PERCENTS) + 1


def test_new_keys_and_cleared_ones_do_not_count() -> None:
    ghosts = Ghosts(10)
    ghosts.admit([key_of(0, 1)], rows=10)
    ghosts.evict([key_of(0, 1)])
    ghosts.clear()
    ghosts.admit([key_of(0, 1)], rows=10)
    assert sum(ghosts.returned) == 0


def test_a_sample_of_a_large_tier_counts_nearly_all() -> None:
    rows = 50_000
    ghosts, chance = Ghosts(rows), random.Random(3)
    assert ghosts.weight * MOST_FOLLOWED >= 5 * rows
    keys = [chance.randbytes(36) for _ in range(rows)]
    for key in keys:
        ghosts.evict([key])
    ghosts.admit(keys, rows)
    counted = sum(ghosts.returned)
    assert 0.75 * rows < counted < 1.25 * rows
    within = ghosts.as_dict()
    assert 0.5 * rows / 4 < within["returned_25"] < 1.5 * rows / 4
