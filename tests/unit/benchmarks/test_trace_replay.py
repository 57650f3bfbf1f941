"""The replay of traces, on traces small enough to follow by hand."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks.policy import main
from benchmarks.replay import belady, replay, replay_replicas
from benchmarks.traces import read_trace, synthetic_trace
from xinference_xavier.policy.order import LRUOrder
from xinference_xavier.policy.reuse import ReuseOrder


def test_belady_keeps_what_is_needed_next():
    # 1, 2 and 3 in turns with two rows: LRU never hits. Belady's hits 1 (drops 2, 3 is new),
    # then 1 again while 2 and 3 pass.
    trace = [[1], [2], [3], [1], [2], [3], [1]]
    assert replay(trace, 2, LRUOrder) == 0
    assert belady(trace, 2) == pytest.approx(3 / 7)


def test_belady_of_one_prompt_drops_the_tail():
    assert belady([[1, 2, 3], [1, 2, 3]], 2) == pytest.approx(2 / 6)


def test_only_a_prefix_counts():
    assert belady([[1, 2], [2], [9, 2]], 4) == pytest.approx(1 / 5)
    assert replay([[1, 2], [9, 2]], 4, LRUOrder) == 0


@pytest.mark.parametrize("order", [LRUOrder, ReuseOrder])
@pytest.mark.parametrize("gpu_share", [0, 0.5, 1])
def test_everything_comes_back_while_it_fits(order, gpu_share):
    trace = [[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]]
    assert replay(trace, 8, order, gpu_share) == pytest.approx((2 + 3) / 10) == belady(trace, 8)


def test_a_replica_reads_what_the_other_has():
    trace = [[1, 2], [1, 2], [1, 2]]
    assert replay_replicas(trace, 2, 16, LRUOrder, aware=False) == pytest.approx(4 / 6)


def test_last_copies_stay_when_replicas_know_of_each_other():
    trace = synthetic_trace(600, seed=3)
    unaware = replay_replicas(trace, 2, 250, ReuseOrder, aware=False)
    assert replay_replicas(trace, 2, 250, ReuseOrder, aware=True) > unaware


def test_reuse_outlasts_scans():
    trace = synthetic_trace(600, seed=4)
    lru, reuse, best = (
        replay(trace, 300, LRUOrder),
        replay(trace, 300, ReuseOrder),
        belady(trace, 300),
    )
    assert lru * 1.1 < reuse < best


def test_traces_are_read_in_order_of_time(tmp_path):
    lines = [{"timestamp": 5, "hash_ids": [2]}, {"timestamp": 1, "hash_ids": [0, 1]}]
    text = "\n".join(map(json.dumps, lines)) + "\n"
    (tmp_path / "trace.jsonl").write_text(text)
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        assert read_trace(tmp_path / name) == [[0, 1], [2]]


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 2}\n')
    with pytest.raises(ValueError, match="line 2: no request"):
        read_trace(tmp_path / "bad.jsonl")


def test_the_last_line_is_json(capsys):
    main(["--requests", "60", "--capacities", "100", "--seed", "2"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,), (shared,) = result["one_replica"], result["shared"]
    assert 0 < row["lru"] <= row["belady"]
    assert shared["each"] == 50
    assert result["requests"] == 60
