"""Sums over replicas, rates between two points, and what counts as an event."""

from __future__ import annotations

import pytest
from cache_views import model, replica, stats

from xinference_xavier.engine.accounts import Accounts
from xinference_xavier.host.counters import Growth, counters_of
from xinference_xavier.host.events import changes
from xinference_xavier.host.parity import Difference, ShareView
from xinference_xavier.host.summary import COSTS, net_growth, rates, summarize
from xinference_xavier.host.view import ReplicaView


def test_sums_over_replicas() -> None:
    first = stats(
        tiers__gpu__snapshots=7,
        tiers__cpu__bytes=100,
        counters__tokens_gpu=10,
        counters__tokens_peer=5,
        counters__failed_copies=2,
        sharing__fetch_failures={"stale": 3},
        sharing__leases=1,
        accounts__net_seconds=4.0,
        shadowed_rows=6,
    )
    second = stats(
        tiers__gpu__snapshots=1,
        counters__tokens_cpu=20,
        sharing__fetch_failures={"stale": 1, "timed_out": 1},
        sharing__quarantined_rows=8,
        accounts__net_seconds=-1.5,
    )
    starting = replica(2, state="starting", address=None, stats=None)
    numbers = summarize(model(replica(0, stats=first), replica(1, stats=second), starting))
    assert (numbers.replicas, numbers.reporting, numbers.stale) == (3, 2, 0)
    assert (numbers.gpu.snapshots, numbers.gpu.rows, numbers.cpu.bytes) == (8, 200, 100)
    assert (numbers.hits_gpu_tokens, numbers.hits_cpu_tokens, numbers.hits_peer_tokens) == (
        *(10, 20, 5),
    )
    assert numbers.tokens_saved == 35
    assert numbers.faults == 7
    assert numbers.faults_by_reason == {"copy": 2, "fetch_stale": 4, "fetch_timed_out": 1}
    assert (numbers.leases, numbers.quarantined_rows, numbers.shadowed_rows) == (1, 8, 6)
    assert numbers.net_seconds == 2.5
    assert summarize(model()).replicas == 0


def test_costs_are_those_of_the_engine() -> None:
    told = Accounts(lambda: None).as_dict({}, ranks=1)
    beside = {"saved_seconds", "net_seconds", "prefill_tokens_per_second"}
    assert set(told) - beside == set(COSTS)


def test_rates_come_from_counters_and_time() -> None:
    growth = Growth()
    before = growth.note(100.0, [(0, 50.0, counters_of(stats()))])
    later = stats(
        counters__demotions=30,
        counters__evictions_cpu=10,
        counters__evictions_gpu=5,
        counters__requests=40,
        counters__tokens_cpu=200,
        copies__load__nbytes=4000,
        sharing__fetched_bytes=800,
        sharing__fetch_failures={"stale": 2},
        accounts__saved_seconds=6.0,
        accounts__load_wait_seconds=1.0,
        accounts__copy_seconds=0.5,
        accounts__scheduler_seconds=0.5,
    )
    after = growth.note(120.0, [(0, 50.0, counters_of(later))])
    found = rates(before, after, 20.0)
    assert found is not None
    assert found.demotions_per_minute == 90.0
    assert found.evictions_per_minute == 45.0
    assert found.requests_per_second == 2.0
    assert found.hit_tokens_per_second == {"gpu": 0.0, "cpu": 10.0, "peer": 0.0}
    assert found.transfer_bytes_per_second == {"store": 0, "load": 200, "move": 0, "fetch": 40}
    assert found.faults_per_minute == 6.0
    assert found.net_seconds_per_second == pytest.approx(0.2)
    assert net_growth(before, after) == 4.0
    assert rates(before, after, 0.0) is None


def test_a_restart_takes_nothing_away() -> None:
    growth = Growth()

    def note(at: float, started: float, demotions: int) -> float:
        told = counters_of(stats(counters__demotions=demotions))
        return growth.note(at, [(0, started, told)])["counters.demotions"]

    assert note(100, started=50, demotions=1000) == 0  # counted before we looked
    assert note(102, started=50, demotions=1010) == 10
    assert growth.note(104, [])["counters.demotions"] == 10  # gone
    assert note(106, started=105, demotions=3) == 13  # another process
    assert note(108, started=105, demotions=4) == 14
    assert note(110, started=105, demotions=2) == 14  # older words of a silent replica
    assert note(111, started=105, demotions=4) == 14
    assert growth.note(112, [(1, 60, {"counters.demotions": 500.0})])["counters.demotions"] == 14
    assert growth.note(114, [(0, 105, {})])["counters.demotions"] == 14  # says nothing


def test_counts_know_counters_that_came_later() -> None:
    growth = Growth()
    early = growth.note(9.0, [(0, 1.0, {"a": 1.0})])
    late = growth.note(10.0, [(0, 1.0, {"a": 2.0, "skips.b": 5.0})])
    assert (early["skips.b"], late["skips.b"], late["a"]) == (0.0, 5.0, 1.0)
    assert late.under("skips.") == {"b": 5.0}


def test_gauges_are_no_counters() -> None:
    paths = counters_of(stats(sharing__fetch_failures={"stale": 1}))
    assert {"counters.demotions", "copies.load.nbytes", "skips.prompt_exceeds_tier"} <= set(paths)
    assert {"sharing.fetch_failures.stale", "sharing.fetched_bytes"} <= set(paths)
    gauges = ("net_seconds", "leases", "peers", "leased_rows", "per_second", "snapshots")
    assert not [path for path in paths if path.split(".")[-1].endswith(gauges)]
    assert counters_of(None) == {}


def kinds(old: list[ReplicaView], new: list[ReplicaView]) -> list[tuple[str, int | None, str]]:
    found = changes([model(*old)], [model(*new)], 5.0)
    assert all((event.at, event.model_uid) == (5.0, "m") for event in found)
    return [(event.kind, event.replica, event.text) for event in found]


def test_nothing_new_is_no_event() -> None:
    assert kinds([replica()], [replica()]) == []
    assert kinds([replica()], [replica(stats=stats(counters__demotions=5))]) == []


def test_replicas_come_and_go() -> None:
    starting = replica(state="starting", address=None, stats=None)
    assert kinds([], [starting]) == [("replica_up", 0, "The replica is starting.")]
    assert kinds([starting], [replica()]) == [("replica_up", 0, "The replica is running.")]
    assert [k for k, *_ in kinds([replica()], [])] == ["replica_gone"]
    restarted = replica(started=2000.0, stats=stats(counters__failed_copies=1))
    assert [k for k, *_ in kinds([replica()], [restarted])] == ["replica_restarted"]


def test_faults_are_told_by_reason() -> None:
    old = stats(counters__failed_copies=1, sharing__fetch_failures={"stale": 4})
    new = stats(
        counters__failed_copies=3,
        counters__mismatches=1,
        sharing__fetch_failures={"stale": 4, "timed_out": 2},
    )
    new["swallowed"] = {"lookup": 5}
    found = kinds([replica(stats=old)], [replica(stats=new)])
    assert [kind for kind, *_ in found] == ["fault"] * 4
    texts = [text for *_, text in found]
    assert texts[0].startswith("Failed copies: 2.")
    assert texts[1].startswith("Failed reads from peers (timed_out): 2.")
    assert texts[2].startswith("Errors in the cache (lookup): 5.")
    assert texts[3].startswith("Loads whose bytes were not those stored: 1.")


@pytest.mark.parametrize(("demoted", "told"), [(24, False), (25, True)])
def test_a_burst_is_a_quarter_of_the_tier(demoted: int, told: bool) -> None:
    found = kinds([replica()], [replica(stats=stats(counters__demotions=demoted))])
    assert bool(found) is told
    if told:
        text = "25 snapshots went to the CPU tier at once; the GPU tier has 100 rows."
        assert found == [("demotion_burst", 0, text)]


def test_a_new_parity_mismatch_is_told_once() -> None:
    apart = Difference(model_uid="m", replica=1, fields={"dtype": ("bf16", None)})
    share = ShareView(scope="s", problem=None, namespace={}, shares_with=[], not_with=[apart])
    found = kinds([replica()], [replica(share=share)])
    text = "It does not share with m/1: dtype is bf16 here and missing there"
    assert found == [("parity", 0, text)]
    assert kinds([replica(share=share)], [replica(share=share)]) == []
