"""Rows that peers read: pinned, capped, and over in time."""

from __future__ import annotations

from policy_cache import Cache, prompt

from xinference_xavier.policy.leases import NOT_NOW, Leases
from xinference_xavier.types import NOWHERE


def test_leased_rows_stay_and_the_verdict_says_whether_they_did() -> None:
    cache, keys = Cache(gpu=8, cpu=0), prompt(1, 2)
    cache.store(keys)
    leases = Leases(cache.index)
    lease = leases.open("peer", now=0.0, ttl_seconds=10)
    assert leases.extend(lease, keys) == [cache.index.where(key) for key in keys]
    cache.store(prompt(2, 8))
    assert cache.tiers(keys) == "GG"
    assert leases.expire(9.9) == 0
    assert leases.release(lease)
    assert not leases.release(lease)
    assert (len(leases), leases.rows) == (0, 0)
    cache.store(prompt(3, 8))
    assert cache.tiers(keys) == "--"


def test_an_expired_lease_gives_its_rows_back_and_has_not_held() -> None:
    cache, keys = Cache(gpu=8, cpu=0), prompt(1, 2)
    cache.store(keys)
    leases = Leases(cache.index)
    lease = leases.open("peer", now=0.0, ttl_seconds=10)
    leases.extend(lease, keys)
    assert leases.expire(10.0) == 1
    assert leases.extend(lease, keys) == [NOT_NOW] * 2
    assert not leases.release(lease)
    assert (leases.expired, leases.rows) == (1, 0)
    cache.store(prompt(2, 8))
    assert cache.tiers(keys) == "--"


def test_only_rows_that_hold_bytes_are_leased() -> None:
    cache, keys = Cache(gpu=8, cpu=8), prompt(1, 4)
    cache.store(keys[:1])
    storing = cache.planner.admit(keys[1:2], cache.mark(), set())
    fetching = cache.planner.plan_fetch(keys[2:3], cache.mark())
    leases = Leases(cache.index)
    found = leases.extend(leases.open("peer", 0.0, 1.0), keys)
    assert found == [cache.index.where(keys[0]), NOT_NOW, NOT_NOW, NOWHERE]
    leases.expire(float("inf"))
    cache.planner.commit_store(storing, ok=True)
    assert fetching is not None
    cache.planner.fetches.commit(fetching.fetch_id, [0])
    cache.index.validate()


def test_caps_per_peer_and_in_all() -> None:
    cache, keys = Cache(gpu=8, cpu=8), prompt(1, 16)
    cache.store(keys)
    leases = Leases(cache.index)
    granted = [
        sum(at > NOT_NOW for at in leases.extend(leases.open(peer, 0.0, 1.0), keys))
        for peer in ("a", "a", "b", "c")
    ]
    assert granted == [4, 0, 4, 0]
    leases.expire(float("inf"))
    assert leases.room("a") == 4
    cache.index.validate()


def test_a_clear_leaves_leased_bytes_alone_until_the_release() -> None:
    cache, keys = Cache(gpu=8, cpu=0), prompt(1, 2)
    cache.store(keys)
    leases = Leases(cache.index)
    lease = leases.open("peer", 0.0, 10.0)
    leases.extend(lease, keys)
    cache.planner.clear()
    assert cache.index.gpu.free == 6
    assert leases.release(lease)
    assert cache.index.gpu.free == 8
    cache.index.validate()
