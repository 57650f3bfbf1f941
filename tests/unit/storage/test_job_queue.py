"""On the CPU a load goes before stores and moves, unless it needs what they have yet to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import ROWS, Rig

from xinference_xavier.storage.cpu_copier import CpuCopier
from xinference_xavier.storage.job_queue import JobQueue
from xinference_xavier.storage.jobs import CopyJob, CopyKind, Indexes
from xinference_xavier.types import NOWHERE

PLACES = st.lists(st.integers(0, 5), max_size=3, unique=True)


def job(job_id: int, kind: CopyKind, blocks: list[int], rows: list[int]) -> CopyJob:
    """A MOVE writes ``rows``, from far away."""
    at, nothing = np.array(rows, np.int64), np.empty(0, np.int64)
    if kind is CopyKind.MOVE:
        return CopyJob(job_id, kind, nothing, (), at + 100, at)
    of_blocks = np.array(blocks, np.int64)
    sources, targets = (at, nothing) if kind is CopyKind.LOAD else (nothing, at)
    return CopyJob(job_id, kind, of_blocks, (len(blocks),), sources, targets)


def order(queue: JobQueue) -> list[int]:
    """Numbers of the jobs, as one thread gets them."""
    queue.close()
    return [got.job_id for got in iter(queue.get, None)]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param(([8], [8]), [3, 1, 2], id="meets nothing"),
        pytest.param(([8], [1]), [1, 2, 3], id="row that a move writes"),
        pytest.param(([8], [101]), [3, 1, 2], id="row that a move only reads"),
        pytest.param(([8], [2]), [1, 2, 3], id="row that a store writes"),
        pytest.param(([2], [8]), [1, 2, 3], id="block that a store reads"),
        pytest.param(([8], [NOWHERE]), [3, 1, 2], id="no row"),
    ],
)
def test_a_load_goes_first_unless_it_meets(
    load: tuple[list[int], list[int]], expected: list[int]
) -> None:
    queue = JobQueue()
    queue.put(job(1, CopyKind.MOVE, [], [1]))
    queue.put(job(2, CopyKind.STORE, [2], [2]))
    queue.put(job(3, CopyKind.LOAD, *load))
    assert order(queue) == expected


def test_a_job_counts_until_the_next_one_is_asked_for() -> None:
    queue = JobQueue()
    queue.put(job(1, CopyKind.STORE, [1], [1]))
    assert queue.get() is not None
    queue.put(job(2, CopyKind.LOAD, [9], [1]))  # of what is being written
    queue.put(job(3, CopyKind.LOAD, [8], [8]))
    first = queue.next_load()
    assert first is not None
    assert first.job_id == 3
    assert queue.next_load() is None
    assert queue.get() is not None  # the second
    queue.put(job(4, CopyKind.STORE, [7], [7]))
    queue.put(job(5, CopyKind.LOAD, [1], [1]))  # whatever wrote that has ended
    assert order(queue) == [5, 4]


@given(st.lists(st.tuples(st.sampled_from([*CopyKind, None]), PLACES), max_size=12))
def test_what_meets_keeps_its_order_and_so_do_stores_and_moves(
    put: list[tuple[CopyKind | None, list[int]]],
) -> None:
    """None stands for the thread that asks for the next job, if there is one."""
    queue, jobs, got = JobQueue(), dict[int, CopyJob](), list[int]()
    for number, (kind, places) in enumerate(put):
        if kind is None:
            if len(got) < len(jobs):
                given_job = queue.get()
                assert given_job is not None
                got.append(given_job.job_id)
            continue
        jobs[number] = job(number, kind, places, places)
        queue.put(jobs[number])
    got += order(queue)
    assert sorted(got) == sorted(jobs)
    at = {number: position for position, number in enumerate(got)}
    for later, after in jobs.items():
        for earlier, before in jobs.items():
            if earlier < later and (meet(before, after) or not (is_load(before) or is_load(after))):
                assert at[earlier] < at[later]


def is_load(copy: CopyJob) -> bool:
    return copy.kind is CopyKind.LOAD


def meet(one: CopyJob, other: CopyJob) -> bool:
    """Whether one writes what the other uses."""
    blocks = set(one.blocks.tolist()) & set(other.blocks.tolist())
    writes = set(one.targets.tolist()) & {*other.targets.tolist(), *other.sources.tolist()}
    written = set(other.targets.tolist()) & set(one.sources.tolist())
    return bool(writes or written or (blocks and (is_load(one) or is_load(other))))


class Held:
    """Holds the copy thread before the first slice of a store or move."""

    def __init__(self, copier: CpuCopier) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        copier._slice_rows = 2
        for name in ("_copy_rows", "_copy_blocks"):
            setattr(copier, name, self._held(getattr(copier, name)))

    def _held(self, copy: Callable[..., None]) -> Callable[..., None]:
        def held(job: CopyJob, positions: Indexes) -> None:
            if job.kind is not CopyKind.LOAD and not self.begun.is_set():
                self.begun.set()
                assert self.go_on.wait(20)
            copy(job, positions)

        return held


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig("cpu", self_check=1.0)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [CopyKind.STORE, CopyKind.MOVE])
def test_a_load_gets_in_between_the_slices_of_a_long_job(rig: Rig, kind: CopyKind) -> None:
    assert isinstance(rig.copier, CpuCopier)
    rig.run(rig.store(range(8), range(8)))
    long = rig.store(range(8, 16), range(8, 16))
    if kind is CopyKind.MOVE:
        long = rig.move(range(8), [~row for row in range(8)])
    own, meets = rig.load([20, 21], [1, 2]), rig.load([22], [int(long.targets[0])])
    wanted = [rig.row_pages(1), rig.row_pages(2)]
    held = Held(rig.copier)
    for submitted in (long, meets, own):
        rig.copier.submit(submitted)
        assert held.begun.wait(20)
    held.go_on.set()
    results = rig.collect(3)
    assert list(results) == [own.job_id, long.job_id, meets.job_id]
    assert all(result.ok for result in results.values())
    assert [rig.block_pages(20), rig.block_pages(21)] == wanted
    assert rig.block_pages(22) == rig.row_pages(int(long.targets[0]))
    assert rig.copier.mismatches == 0


def test_time_given_to_loads_is_theirs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(rig.copier, CpuCopier)
    rig.run(rig.store([0, 1], [0, 1]))
    long, load = rig.store(range(8, 16), range(8, 16)), rig.load([20], [1])
    held = Held(rig.copier)
    copy_load = rig.copier._load

    def slow(job: CopyJob) -> tuple[Indexes, str]:
        assert not threading.Event().wait(0.2)
        return copy_load(job)

    monkeypatch.setattr(rig.copier, "_load", slow)
    began = time.perf_counter()
    rig.copier.submit(long)
    assert held.begun.wait(20)
    rig.copier.submit(load)
    held.go_on.set()
    results = rig.collect(2)
    wall = time.perf_counter() - began
    assert results[load.job_id].seconds >= 0.2
    assert 0 < results[long.job_id].seconds <= wall - 0.2


def test_a_failure_between_slices_is_the_loads_alone(rig: Rig) -> None:
    assert isinstance(rig.copier, CpuCopier)
    long, bad = rig.store(range(8), range(8)), rig.load([20], [ROWS])
    held = Held(rig.copier)
    rig.copier.submit(long)
    assert held.begun.wait(20)
    rig.copier.submit(bad)
    held.go_on.set()
    results = rig.collect(2)
    assert results[long.job_id].ok
    assert results[bad.job_id].failed.tolist() == [0]
