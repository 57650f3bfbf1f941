"""The demonstration's verdict: it must not claim what its figures do not show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.demo.client import Answer, CacheState, Counters
from examples.demo.report import Record, Report, find_problems

NOTHING = CacheState(Counters(0, 0, 0, 0, 0, 0, 0, 0, 0, 0), gpu_snapshots=0, cpu_snapshots=0)
COLD = replace(NOTHING.counters, requests=1, tokens_prompt=100, tokens_computed=100)
GPU_HIT = replace(COLD, tokens_gpu=96, tokens_computed=4)
CPU_HIT = replace(COLD, tokens_cpu=96, tokens_computed=4)
GOOD = {"failed": 0, "identical_outputs": True, "hits_gpu": 3, "hits_cpu": 3, "demotions": 3}


def record(spent: Counters, seconds: float, text: str = "x") -> Record:
    return Record(1, "first", Answer(text, seconds), expected="x", spent=spent)


def test_times_are_told_apart_by_where_most_tokens_came_from() -> None:
    report = Report()
    for spent, seconds in ((COLD, 5.0), (COLD, 7.0), (GPU_HIT, 0.1), (CPU_HIT, 0.2)):
        report.add(record(spent, seconds))
    after = CacheState(replace(COLD, demotions=9, hits_gpu_blocks=3, hits_cpu_blocks=2), 4, 5)
    assert report.summary(NOTHING, after) == {
        "requests": 4,
        "failed": 0,
        "identical_outputs": True,
        "gpu_snapshots": 4,
        "cpu_snapshots": 5,
        "demotions": 9,
        "hits_gpu": 3,
        "hits_cpu": 2,
        "misses": 0,
        "ttft_cold_p50_s": 6.0,
        "ttft_gpu_hit_p50_s": 0.1,
        "ttft_cpu_hit_p50_s": 0.2,
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
        ("demotions", 0),
    ],
)
def test_each_shortcoming_is_named(name: str, value: object) -> None:
    assert len(find_problems({**GOOD, name: value})) == 1
