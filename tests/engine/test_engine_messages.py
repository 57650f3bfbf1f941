"""What scheduler and workers tell each other survives pickling, and ranks add up in any order."""

from __future__ import annotations

import itertools
import pickle
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from xinference_xavier.engine.messages import (
    Copied,
    MoveJob,
    RankCapacity,
    RowsSpec,
    XavierConnectorMetadata,
    XavierWorkerMetadata,
)
from xinference_xavier.policy.plans import LoadPlan, MovePlan, StorePlan
from xinference_xavier.types import NOWHERE, Tier

KEYS = [bytes([i]) * 32 + b"\0\0\0\0" for i in range(4)]


def test_rows_travel_without_their_plan() -> None:
    spec = RowsSpec.of(LoadPlan(7, KEYS, [3, ~1, NOWHERE, 0]))
    copy = pickle.loads(pickle.dumps(spec))
    assert copy.locations.tolist() == [3, ~1, NOWHERE, 0]
    assert copy.locations.dtype == np.int64
    assert copy.plan is None
    assert spec.plan is not None
    assert KEYS[0] not in pickle.dumps(spec)


def test_a_step_travels_whole() -> None:
    blocks = GPULoadStoreSpec([5, 6], group_sizes=[2], block_indices=[0])
    sent = XavierConnectorMetadata(
        load_jobs={4: TransferJob("b", RowsSpec.of(LoadPlan(2, KEYS[2:], [~9, ~8])), blocks)},
        store_jobs={3: TransferJob("a", blocks, RowsSpec.of(StorePlan(KEYS[:2], [0, 1])))},
        jobs_to_flush={3},
        moves=[MoveJob.of(-1, MovePlan(Tier.CPU, KEYS[:2], [5, 2], [~0, ~1]))],
    )
    got = pickle.loads(pickle.dumps(sent))
    assert got.load_jobs[4].req_id == "b"
    assert got.load_jobs[4].src_spec.locations.tolist() == [~9, ~8]
    assert got.load_jobs[4].dst_spec.block_ids.tolist() == [5, 6]
    assert got.store_jobs[3].dst_spec.locations.tolist() == [0, 1]
    assert got.jobs_to_flush == {3}
    assert got.moves[0].job_id == -1
    # In order of the sources, so that neighbours are seen as one run; pairs stay pairs.
    assert got.moves[0].sources.tolist() == [2, 5]
    assert got.moves[0].targets.tolist() == [~1, ~0]


def test_a_capacity_travels_whole() -> None:
    capacity = RankCapacity(1, 2, 3, 4, 5)
    assert pickle.loads(pickle.dumps(capacity)) == capacity


jobs = st.integers(-5, 5)
counts = st.dictionaries(jobs, st.integers(1, 3), max_size=4)
failures = st.dictionaries(jobs, st.frozensets(st.integers(0, 9), max_size=4), max_size=3)
work = st.builds(Copied, st.integers(0, 9), st.integers(0, 10**6), st.integers(0, 9))
reports = st.builds(
    XavierWorkerMetadata,
    completed_jobs=counts,
    completed_moves=counts,
    failed=failures,
    copied=st.dictionaries(st.sampled_from(["store", "load", "move"]), work, max_size=3),
    mismatches=st.integers(0, 3),
)


@given(st.lists(reports, min_size=2, max_size=4))
def test_ranks_add_up_in_any_order(ranks: list[XavierWorkerMetadata]) -> None:
    before = [pickle.dumps(rank) for rank in ranks]
    sums = [
        reduce(lambda a, b: a.aggregate(b), order)
        for order in itertools.islice(itertools.permutations(ranks), 6)
    ]
    total = sums[0]
    assert all(other == total for other in sums)
    for job_id in total.completed_jobs:
        assert total.completed_jobs[job_id] == sum(r.completed_jobs.get(job_id, 0) for r in ranks)
    for job_id in total.completed_moves:
        assert total.completed_moves[job_id] == sum(r.completed_moves.get(job_id, 0) for r in ranks)
    for job_id, positions in total.failed.items():
        assert positions == frozenset().union(*(r.failed.get(job_id, ()) for r in ranks))
    assert set(total.failed) == {job_id for rank in ranks for job_id in rank.failed}
    assert total.mismatches == sum(rank.mismatches for rank in ranks)
    assert before == [pickle.dumps(rank) for rank in ranks]  # nothing was changed in place


def test_the_base_alone_would_lose_our_fields() -> None:
    """Why ``aggregate`` is overridden: vLLM's returns its own class."""
    report = XavierWorkerMetadata(completed_moves={-1: 1})
    assert type(OffloadingWorkerMetadata().aggregate(report)) is OffloadingWorkerMetadata
    assert type(report.aggregate(XavierWorkerMetadata())) is XavierWorkerMetadata


@pytest.mark.parametrize(
    "report",
    [
        XavierWorkerMetadata(completed_jobs={0: 1}),
        XavierWorkerMetadata(completed_moves={-1: 1}),
        XavierWorkerMetadata(failed={0: frozenset()}),
        XavierWorkerMetadata(mismatches=1),
    ],
)
def test_only_an_empty_report_is_not_sent(report: XavierWorkerMetadata) -> None:
    assert XavierWorkerMetadata().is_empty()
    assert not report.is_empty()
