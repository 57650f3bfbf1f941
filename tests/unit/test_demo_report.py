"""The demonstration's verdict: it must not claim what its figures do not show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.demo.client import Answer, CacheState, Counters
from examples.demo.report import Record, Report, find_problems

NOTHING = CacheState(Counters(*[0] * 12), 0, 0, 0, 0, requests=(0, 0), peers=(1, 1))
COLD = replace(NOTHING.counters, requests=1, tokens_prompt=100, tokens_computed=100)
GPU_HIT = replace(COLD, tokens_gpu=96, tokens_computed=4)
CPU_HIT = replace(COLD, tokens_cpu=96, tokens_computed=4)
PEER_HIT = replace(COLD, tokens_peer=96, tokens_computed=4)
GOOD = {
    "failed": 0,
    "identical_outputs": True,
    "hits_gpu": 3,
    "hits_cpu": 3,
    "demotions": 3,
    "hits_peer": 3,
}


def record(spent: Counters, seconds: float, text: str = "x") -> Record:
    return Record(1, "first", Answer(text, seconds), expected="x", spent=spent)


def test_times_are_told_apart_by_where_most_tokens_came_from() -> None:
    report = Report()
    for spent, seconds in (
        (COLD, 5.0),
        (COLD, 7.0),
        (GPU_HIT, 0.1),
        (CPU_HIT, 0.2),
        (PEER_HIT, 0.3),
    ):
        report.add(record(spent, seconds))
    grown = replace(COLD, demotions=9, hits_gpu_blocks=3, hits_cpu_blocks=2, hits_peer_blocks=1)
    after = CacheState(grown, 4, 5, 2, 1, requests=(1, 0), peers=(1, 1))
    assert report.summary(NOTHING, after) == {
        "requests": 5,
        "failed": 0,
        "identical_outputs": True,
        "gpu_snapshots": 4,
        "cpu_snapshots": 5,
        "demotions": 9,
        "hits_gpu": 3,
        "hits_cpu": 2,
        "hits_peer": 1,
        "misses": 0,
        "fetches": 2,
        "fetch_failures": 1,
        "ttft_cold_p50_s": 6.0,
        "ttft_gpu_hit_p50_s": 0.1,
        "ttft_cpu_hit_p50_s": 0.2,
        "ttft_peer_hit_p50_s": 0.3,
    }


def test_one_different_output_is_enough_to_fail() -> None:
    report = Report()
    report.add(record(COLD, 5.0))
    report.add(record(GPU_HIT, 0.1, text="y"))
    assert report.summary(NOTHING, NOTHING)["identical_outputs"] is False


def test_failed_request_is_counted_and_has_no_time() -> None:
    report = Report()
    report.add(Record(1, "first", Answer(error="status 500"), expected="x", spent=COLD))
    summary = report.summary(NOTHING, NOTHING)
    assert (summary["failed"], summary["ttft_cold_p50_s"]) == (1, None)
    assert summary["identical_outputs"] is False


def test_nothing_to_complain_about() -> None:
    assert find_problems(dict(GOOD)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("failed", 1),
        ("identical_outputs", False),
        ("hits_gpu", 0),
        ("hits_cpu", 0),
        ("hits_peer", 0),
        ("demotions", 0),
    ],
)
def test_each_shortcoming_is_named(name: str, value: object) -> None:
    assert len(find_problems({**GOOD, name: value})) == 1


def test_the_replica_that_answered_is_the_one_that_counted() -> None:
    later = replace(NOTHING, requests=(0, 1))
    assert later.answered_by(NOTHING) == 1
    assert later.answered_by(later) is None
