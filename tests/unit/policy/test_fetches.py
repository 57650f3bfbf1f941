"""Rows read from a peer: what may use them before, while and after the bytes arrive."""

from __future__ import annotations

import pytest
from policy_cache import Cache, prompt

from xinference_xavier.policy.columns import FETCHING, FREE, READY, ZOMBIE
from xinference_xavier.policy.index import Found
from xinference_xavier.policy.plans import FetchPlan


def fetch(cache: Cache, keys: list[bytes]) -> FetchPlan:
    plan = cache.planner.plan_fetch(keys, cache.mark())
    assert plan is not None
    cache.index.validate()
    return plan


def free(cache: Cache) -> int:
    cache.index.validate()
    return cache.index.gpu.free + cache.index.cpu.free


def test_what_arrived_is_readable_and_kept_for_its_request() -> None:
    cache, keys = Cache(gpu=8, cpu=0), prompt(1, 2)
    changes: list[tuple[bytes, bool]] = []
    cache.index.on_change = lambda key, readable: changes.append((key, readable))
    plan = fetch(cache, keys)
    assert [cache.index.lookup(key) for key in keys] == [Found.PENDING] * 2
    assert cache.planner.pin_for_load(keys, 1).locations != plan.locations
    assert changes == []
    cache.planner.fetches.commit(plan.fetch_id)
    assert [cache.index.lookup(key) for key in keys] == [Found.HIT] * 2
    assert changes == [(key, True) for key in keys]
    assert cache.counters.fetched == 2
    cache.store(prompt(2, 2))
    cache.store(prompt(3, 8))  # would evict both, were they not kept
    assert cache.tiers(keys) == "GG"
    cache.planner.fetches.release(plan.fetch_id)
    cache.planner.fetches.release(plan.fetch_id)
    cache.store(prompt(4, 8))
    assert cache.tiers(keys) == "--"


def test_a_load_may_wait_for_the_bytes() -> None:
    cache, keys = Cache(gpu=4, cpu=4), prompt(1, 2)
    cache.index.hit_while_fetching = True
    plan = fetch(cache, keys)
    load = cache.planner.pin_for_load(keys, 7)
    assert (load.locations, load.waits_for) == (plan.locations, frozenset({plan.fetch_id}))
    cache.planner.fetches.release(plan.fetch_id)
    cache.planner.fetches.commit(plan.fetch_id)
    assert cache.index.gpu.pins[plan.locations[0]] == 1
    assert cache.planner.pin_for_load(keys, 8).waits_for == frozenset()
    cache.planner.finish_load(load)
    cache.index.validate()


@pytest.mark.parametrize("waiting", [True, False])
def test_what_did_not_arrive_is_forgotten(waiting: bool) -> None:
    cache, keys = Cache(gpu=4, cpu=4), prompt(1, 2)
    cache.index.hit_while_fetching = True
    plan = fetch(cache, keys)
    load = cache.planner.pin_for_load(keys, 7) if waiting else None
    cache.planner.fetches.commit(plan.fetch_id, failed=[1])
    assert cache.tiers(keys) == "G-"
    cache.planner.fetches.release(plan.fetch_id)
    if load is not None:
        assert cache.index.gpu.state[plan.locations[1]] == ZOMBIE
        cache.planner.finish_load(load, [1])
    assert cache.index.gpu.state[plan.locations[1]] == FREE
    assert free(cache) == 7
    assert cache.planner.fetches.room() == 2


def test_rows_in_quarantine_are_used_by_nobody_until_it_ends() -> None:
    cache, keys = Cache(gpu=8, cpu=0), prompt(1, 2)
    plan = fetch(cache, keys)
    cache.planner.fetches.commit(plan.fetch_id, failed=[0, 1], quarantined=True)
    assert cache.tiers(keys) == "--"
    assert cache.planner.fetches.quarantined_rows == 2
    assert cache.planner.plan_fetch(prompt(2, 1), cache.mark()) is None
    assert len(cache.store(prompt(3, 8))) == 6
    cache.planner.fetches.settle(plan.fetch_id)
    cache.planner.fetches.settle(plan.fetch_id)
    assert cache.planner.fetches.quarantined_rows == 0
    assert free(cache) == 2
    assert cache.planner.fetches.room() == 2


def test_a_clear_while_bytes_are_on_their_way() -> None:
    cache, keys = Cache(gpu=8, cpu=0), prompt(1, 2)
    plan = fetch(cache, keys)
    cache.planner.clear()
    assert cache.index.gpu.state[plan.locations[0]] == ZOMBIE
    assert len(cache.store(keys)) == 2  # the same keys, other rows
    cache.planner.fetches.commit(plan.fetch_id, failed=[1])
    cache.planner.fetches.release(plan.fetch_id)
    assert free(cache) == 6
    assert cache.tiers(keys) == "GG"


def test_fetches_take_no_more_than_their_share_and_only_what_is_missing() -> None:
    cache, keys = Cache(gpu=8, cpu=8), prompt(1, 6)
    cache.store(keys[:1])
    plan = fetch(cache, keys)
    assert plan.keys == keys[1:5]
    assert all(cache.index.gpu.state[at] == FETCHING for at in plan.locations)
    assert cache.planner.plan_fetch(prompt(2, 1), cache.mark()) is None
    assert cache.planner.fetches.commit(99) is None
    cache.planner.fetches.commit(plan.fetch_id)
    cache.planner.fetches.release(plan.fetch_id)
    assert [cache.index.gpu.state[at] for at in plan.locations] == [READY] * 4
    assert cache.planner.fetches.room() == 4
