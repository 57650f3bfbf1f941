"""Advice follows from evidence: built histories, and a cache that really is too small."""

from __future__ import annotations

from typing import Any

import pytest
from cache_views import history, model, replica, stats

from xinference_xavier.host.advisor import Advice, advise
from xinference_xavier.policy.ghosts import PERCENTS
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.planner import Planner


def advice(*stages: dict[str, Any], apart: float = 60.0) -> list[Advice]:
    return advise(*history(*stages, apart=apart))


def test_without_evidence_nothing_is_said() -> None:
    assert advice({}, {}) == []
    assert advise(model(), []) == []
    assert advise(model(replica(stats=None)), []) == []
    good = {"accounts__saved_seconds": 9.0, "accounts__load_wait_seconds": 1.0}
    assert advice({}, {**good, "counters__demotions": 500}) == []


def test_a_short_past_proves_nothing() -> None:
    harm = {"accounts__copy_seconds": 50.0, "reuse__returned_25": 5000}
    assert advice({}, harm, apart=59.0) == []
    assert len(advice({}, harm, apart=60.0)) == 2


def test_harm_is_said_first_with_its_cause_and_offers_to_pause() -> None:
    found = advice(
        {"accounts__saved_seconds": 100.0},
        {
            "accounts__saved_seconds": 101.0,
            "accounts__load_wait_seconds": 12.0,
            "accounts__copy_seconds": 2.0,
            "reuse__returned_50": 10_000,
        },
        apart=600.0,
    )
    assert [each.kind for each in found] == ["harm", "cpu_budget"]
    assert found[0].pause_stores
    assert found[0].text == (
        "In the last 10 minutes the cache cost 13 s more than the 1 s of prefill that it saved, "
        "most of it by waiting for loads: pause stores until prompts repeat."
    )
    assert not found[1].pause_stores


def test_harm_that_is_long_ago_is_not_said() -> None:
    bad = {"accounts__copy_seconds": 50.0}
    assert [a.kind for a in advice({}, bad, apart=300.0)] == ["harm"]
    assert advice({}, bad, bad, bad, apart=300.0) == []


def test_the_smallest_tier_that_keeps_most_is_proposed() -> None:
    returned = {"reuse__returned_25": 10, "reuse__returned_50": 85, "reuse__returned_400": 5}
    (found,) = advice({}, returned)
    # 400 rows of 1 MiB and half as many again; 95 blocks of 16 tokens at 1,000 tokens a second.
    assert found.budgets == {"xavier_cpu_budget": 600 * 2**20}
    assert found.seconds == pytest.approx(95 * 16 / 1000)
    assert "xavier_cpu_budget of 600MiB instead of 400MiB" in found.text
    assert "95 of the blocks" in found.text
    assert "the last minute: 1.5 s of prefill" in found.text


def test_what_no_tier_would_keep_or_nobody_would_miss_is_not_proposed() -> None:
    assert advice({}, {"reuse__returned_beyond": 5000}) == []
    assert advice({}, {"reuse__returned_25": 15}) == []
    slow_copies = {"copies__load__nbytes": 2**20, "copies__load__seconds": 1.0}
    assert advice({}, {"reuse__returned_25": 500, **slow_copies}) == []
    unmeasured = {"accounts__prefill_tokens_per_second": None}
    assert advice({}, {"reuse__returned_25": 500, **unmeasured}) == []


def test_without_a_cpu_tier_one_is_proposed() -> None:
    off = {"tiers__cpu__rows": 0}
    (found,) = advice(off, {**off, "reuse__returned_100": 50})
    assert found.budgets == {"xavier_cpu_budget": 100 * 2**20}
    assert "instead of 0 per replica" in found.text


def test_churn_between_the_tiers_asks_for_gpu_budget() -> None:
    churn = {"counters__promotions": 60, "counters__demotions": 90, "copies__move__seconds": 2.0}
    (found,) = advice({}, churn)
    assert found.kind == "gpu_budget"
    assert found.budgets == {"xavier_gpu_budget": 160 * 2**20}
    assert found.seconds == pytest.approx(2.0 * 120 / 150)
    assert advice({}, {**churn, "counters__promotions": 20}) == []
    assert advice({}, {**churn, "copies__move__seconds": 0.01}) == []


def test_reads_that_cost_more_than_they_save() -> None:
    reads = {"accounts__saved_seconds": 9.0, "counters__tokens_peer": 1000}
    waits = {"accounts__fetch_wait_seconds": 2.0, "accounts__failed_fetch_seconds": 1.0}
    (found,) = advice({}, {**reads, **waits})
    assert (found.kind, found.seconds) == ("min_fetch", pytest.approx(2.0))
    assert "xavier_min_fetch" in found.text
    assert advice({}, {**reads, "accounts__fetch_wait_seconds": 0.9}) == []


def test_a_cpu_tier_below_the_engines_pool_is_a_conflict() -> None:
    (found,) = advice({"pool_blocks": 500})  # before any history
    assert found.kind == "conflict"
    assert found.budgets == {"xavier_cpu_budget": 1000 * 2**20}
    assert "6400 tokens and the engine's KV pool 8000" in found.text
    assert advice({"pool_blocks": 400}) == []
    assert advice({"pool_blocks": 500, "tiers__cpu__rows": 0}) == []


def test_sentences_are_ranked_by_seconds() -> None:
    found = advice(
        {"pool_blocks": 500},
        {
            "pool_blocks": 500,
            "reuse__returned_25": 100,
            "counters__promotions": 100,
            "counters__demotions": 100,
            "copies__move__seconds": 5.0,
        },
    )
    assert [each.kind for each in found] == ["gpu_budget", "cpu_budget", "conflict"]


class SmallCache:
    """The real policy on a few rows; copies succeed at once."""

    def __init__(self, gpu: int, cpu: int) -> None:
        self.rows = (gpu, cpu)
        self.index = SnapshotIndex(gpu, cpu)
        self.planner = Planner(self.index, low_water=1)

    def ask(self, mark: int, keys: list[bytes]) -> int:
        """One request: load the prefix that is there, compute and store the rest."""
        here = next((i for i, key in enumerate(keys) if key not in self.index), len(keys))
        if here:
            self.planner.finish_load(self.planner.pin_for_load(keys[:here], mark))
        self.planner.commit_store(self.planner.admit(keys[here:], mark, set()), ok=True)
        self._move()
        self.planner.retire(keys, mark)
        self._move()
        return len(keys) - here

    def _move(self) -> None:
        while plans := self.planner.plan_moves():
            for plan in plans:
                self.planner.commit_move(plan, ok=True)

    def stage(self) -> dict[str, Any]:
        gpu, cpu = self.rows
        counts = {f"reuse__{name}": n for name, n in self.index.ghosts.as_dict().items()}
        return {"tiers__gpu__rows": gpu, "tiers__cpu__rows": cpu, "pool_blocks": 8, **counts}


def serve(cache: SmallCache, conversations: int, rounds: int) -> int:
    """Conversations of 8 blocks in turn; blocks computed after the first round."""
    computed = 0
    for mark in range(conversations * rounds):
        who = mark % conversations
        keys = [f"{who:03}/{block}".encode() + bytes(4) for block in range(8)]
        took = cache.ask(mark + 1, keys)
        computed += took if mark >= conversations else 0
    return computed


def test_advice_from_a_cache_that_is_too_small_is_right() -> None:
    cache = SmallCache(gpu=8, cpu=40)
    before = cache.stage()
    assert serve(cache, conversations=8, rounds=6) > 100
    (found,) = advice(before, cache.stage())
    assert found.kind == "cpu_budget"
    proposed = found.budgets["xavier_cpu_budget"] // stats()["row_bytes"]
    assert 40 < proposed <= 40 * (1 + PERCENTS[1] / 100)
    roomier = SmallCache(gpu=8, cpu=proposed)
    before = roomier.stage()
    assert serve(roomier, conversations=8, rounds=6) == 0
    assert advice(before, roomier.stage()) == []
