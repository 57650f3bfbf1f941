"""The serving benchmark's verdict: it must not claim what its lines do not show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.plots import draw
from benchmarks.serving.report import COLUMNS, rounds_table, summarise, table
from benchmarks.serving.runs import Runs, Settings, read
from benchmarks.serving.workload import Sizes

SETTINGS = Settings(Sizes.scaled(0.05), "demo", 32, 100, 1 << 20, 1 << 24)


def line(run: int, mode: str, part: str, *values: float, **more: Any) -> dict[str, Any]:
    """A part whose figures are all of one value in each round."""
    found = [
        {
            "seconds": 10.0,
            "figures": {"incoming": dict.fromkeys(COLUMNS, value)},
            "failed": [],
            "counters": None,
            **more,
        }
        for value in values
    ]
    settings = json.loads(json.dumps(SETTINGS.as_json()))
    return {"run": run, "mode": mode, "part": part, "settings": settings, "rounds": found}


def counted(**changes: int) -> dict[str, Any]:
    names = ("engine", "gpu", "cpu", "peer", "computed")
    counters = {f"tokens_{name}": 0 for name in names} | {"demotions": 0}
    counters |= {"hits_gpu_blocks": 0, "hits_cpu_blocks": 0} | changes
    sharing = {"fetches": changes.get("fetches", 0)}
    return {"counters": counters, "sharing": sharing, "accounts": {"scheduler_seconds": 0.2}}


def targets(summary: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in summary["targets"]}


def test_rounds_are_compared_with_those_of_the_neighbouring_run() -> None:
    lines = [
        line(0, "plain", "interleaved", 1.0, 2.0),
        line(1, "xavier", "interleaved", 1.1, 2.2),
        line(2, "xavier", "interleaved", 4.0, 4.0),
        line(3, "plain", "interleaved", 4.0, 5.0),
    ]
    found = targets(summarise(lines))["interleaved TTFT p50"]
    assert found["ratio"] == pytest.approx({"median": 1.05, "least": 0.8, "greatest": 1.1, "n": 4})
    assert not found["met"]


def test_what_is_missed_is_named_and_what_was_not_run_is_not_judged() -> None:
    lines = [
        line(0, "plain", "shared", 3.0),
        line(1, "xavier", "shared", 0.9),
        line(0, "plain", "unique", 100.0),
        line(1, "xavier", "unique", 97.0),
    ]
    summary = summarise(lines)
    assert targets(summary)["shared prefixes TTFT p50"]["met"]
    assert summary["targets_missed"] == ["all-unique tokens/s"]
    assert "interleaved TTFT p50, NIXL pair" in summary["targets_not_covered"]
    assert "convoy fetches" in summary["targets_not_covered"]


@pytest.mark.parametrize(("fetches", "met"), [(1, True), (2, False), (0, False)])
def test_a_convoy_is_one_fetch(fetches: int, met: bool) -> None:
    lines = [line(1, "xavier", "convoy", 1.0, counters=counted(fetches=fetches))]
    assert targets(summarise(lines))["convoy fetches"]["met"] is met


@pytest.mark.parametrize("missing", ["demotions", "hits_gpu_blocks", "hits_cpu_blocks"])
def test_a_small_budget_must_demote_and_hit_both_tiers(missing: str) -> None:
    name = "small budget hits both tiers"
    seen = {"demotions": 5, "hits_gpu_blocks": 5, "hits_cpu_blocks": 5}
    good = [line(0, "small", "tiers", 1.0, counters=counted(**seen))]
    assert targets(summarise(good))[name]["met"]
    bad = [line(0, "small", "tiers", 1.0, counters=counted(**{**seen, missing: 0}))]
    assert summarise(bad)["targets_missed"] == [name]


def test_failed_requests_are_named() -> None:
    lines = [line(0, "plain", "unique", 1.0, failed=["incoming3: status 500"])]
    assert summarise(lines)["failed"] == ["plain/unique: incoming3: status 500"]


def test_the_schedulers_share_is_of_both_replicas() -> None:
    samples = [{"pid": 1, "samples": 1000, "busy": 100, "ours": 2}]
    lines = [line(1, "xavier", "unique", 1.0, 1.0, counters=counted(), profile=samples)]
    found = summarise(lines)["scheduler"]["xavier/unique"]
    assert found["connector"]["median"] == pytest.approx(0.4 / 40)
    assert found["of_all"]["median"] == pytest.approx(0.002)
    assert found["of_busy"]["median"] == pytest.approx(0.02)


def test_tables_say_times_in_milliseconds_and_counters_by_round() -> None:
    lines = [
        line(0, "plain", "unique", 0.5),
        line(1, "xavier", "unique", 0.25, counters=counted(tokens_peer=321)),
    ]
    assert "500.0 (500.0-500.0)" in table(lines)
    assert "321" in rounds_table(lines)


def test_results_of_other_sizes_are_refused_and_none_are_none(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read(path, SETTINGS) == []
    path.write_text(json.dumps(line(0, "plain", "unique", 1.0)) + "\n")
    assert len(read(path, SETTINGS)) == 1
    with pytest.raises(ValueError, match=r"--results .*name another file"):
        read(path, replace(SETTINGS, pool_blocks=7))


def test_a_run_continues_with_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(line(1, "xavier", "unique", 1.0)) + "\n")
    runs = Runs(path, SETTINGS, tmp_path, tmp_path)
    missing = runs.missing(["plain", "xavier"], ["unique", "chat"])
    assert missing == [(0, "plain", "unique"), (0, "plain", "chat"), (1, "xavier", "chat")]


def test_plots_are_pictures_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [line(0, "plain", "unique", 1.0, 2.0), line(1, "xavier", "unique", 1.0, 2.0)]
    drawn = draw(lines, tmp_path / "plots")
    assert len(drawn) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
