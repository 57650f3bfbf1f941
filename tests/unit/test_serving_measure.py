"""The serving benchmark's figures, of records whose answers can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serving.measure import difference, failed, figures, gaps, total, tpot
from benchmarks.serving.profile import share


def record(name: str, group: str, sent: float, *chunks: float, error: str | None = None) -> Any:
    return {
        "name": name,
        "group": group,
        "sent": sent,
        "chunks": list(chunks),
        "tokens": len(chunks),
        "error": error,
    }


def test_figures_of_a_round() -> None:
    records = [
        record("stream0", "stream", 0.0, 1.0, 9.0, 11.0, 12.0, 30.0),
        record("prefix", "prepare", 0.0, 5.0),
        record("incoming0", "incoming", 10.0, 11.0, 12.0, 14.0),
        record("incoming1", "incoming", 10.5, 13.5, 20.0),
        record("incoming2", "incoming", 10.5, error="status 500"),
    ]
    found = figures(records)
    assert found.keys() == {"incoming"}
    incoming = found["incoming"]
    assert incoming["requests"] == 3
    assert incoming["failed"] == 1
    assert incoming["seconds"] == 10.0
    assert incoming["ttft"] == {"incoming0": 1.0, "incoming1": 3.0}
    assert incoming["ttft_p50"] == 2.0
    assert incoming["ttft_p95"] == pytest.approx(2.9)
    # 1.5 s a token and 6.5 s a token.
    assert incoming["tpot_p95"] == pytest.approx(1.5 + 0.95 * 5.0)
    # Within 10 s to 20 s the stream said two tokens after gaps of 2 s and 1 s.
    assert incoming["gaps"] == 2
    assert incoming["gap_p99"] == pytest.approx(1.99)
    assert incoming["tokens_per_second"] == pytest.approx((5 + 2) / 10)


def test_nothing_answered_has_no_times() -> None:
    found = figures([record("incoming0", "incoming", 1.0, error="gone")])["incoming"]
    assert found["ttft_p50"] is None
    assert found["tokens_per_second"] is None
    assert found["failed"] == 1


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert tpot(record("a", "incoming", 0.0, 1.0)) is None


def test_gaps_are_those_within_one_stream() -> None:
    streams = [record("a", "stream", 0, 1.0, 2.0), record("b", "stream", 0, 5.0, 5.5)]
    assert gaps(streams, 0.0, 10.0) == [1.0, 0.5]


def test_failures_of_requests_that_only_prepare_are_told() -> None:
    assert failed([record("prefix0", "prepare", 0.0, error="x")]) == ["prefix0: x"]


def test_counters_are_added_over_replicas_and_compared_with_before() -> None:
    before = total([{"counters": {"hits": 1}}, {"counters": {"hits": 2}}])
    after = total([{"counters": {"hits": 5}}, {"counters": {"hits": 4}, "skips": {"late": 1}}])
    assert difference(after, before) == {"counters": {"hits": 6}, "skips": {"late": 1}}


def test_samples_are_those_of_the_scheduler() -> None:
    stacks = "\n".join(
        [
            "thread (0x1): MainThread;run (core.py:1);f (/x/xinference_xavier/a.py:1) 7",
            "thread (0x1): MainThread;run (core.py:1);schedule (scheduler.py:2) 33",
            "thread (0x1): MainThread;run (core.py:1);wait (threading.py:2) 60",
            "thread (0x2): actors;f (/x/xinference_xavier/b.py:1) 900",
        ]
    )
    assert share(stacks) == {"samples": 100, "busy": 40, "ours": 7}
