"""Loads that wait for a fetch: copied while it arrives, believed when it has ended."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from xinference_xavier.engine import held as held_module
from xinference_xavier.engine.held import HeldLoads
from xinference_xavier.storage.copier import CopyJob, CopyKind, CopyResult, create_copier
from xinference_xavier.storage.gates import Gates
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.slab import Slab

BLOCKS = 16
ROWS = 8
#: Two rows that were here before, then six that are fetched, in both tiers.
LOCATIONS = [0, ~1, 2, 3, ~4, ~5, 6, 7]
FETCHED = LOCATIONS[2:]


class Rank:
    """A copier with slabs and KV caches, and the loads before it."""

    def __init__(self) -> None:
        tensors = [torch.zeros(BLOCKS, 64, dtype=torch.int8) for _ in range(3)]
        self.layout = RowLayout.from_refs(tensors, [[(i, 64) for i in range(3)]])
        self.slabs = [Slab(ROWS, self.layout.row_bytes, "cpu") for _ in range(2)]
        self.copier = create_copier(self.layout, *self.slabs)
        self.gates = Gates()
        self.loads = HeldLoads(self.copier, self.gates)
        for location in LOCATIONS:
            self.write(location, 100 + LOCATIONS.index(location))

    def write(self, location: int, value: int) -> None:
        slab, row = (self.slabs[0], location) if location >= 0 else (self.slabs[1], ~location)
        slab.view(row, 1).fill_(value)

    def block(self, number: int) -> set[int]:
        return {int(v) for tensor in self.layout.tensors for v in tensor[number]}

    def load(self, fetches: frozenset[int], job_id: int = 1) -> None:
        blocks = np.arange(len(LOCATIONS), dtype=np.int64)
        sources = np.array(LOCATIONS, np.int64)
        empty = np.empty(0, np.int64)
        job = CopyJob(job_id, CopyKind.LOAD, blocks, (len(blocks),), sources, empty)
        self.loads.submit(job, fetches)

    def arrive(self, *locations: int, fetch_id: int = 1) -> None:
        self.gates.arrive(fetch_id, np.array(locations, np.int64))

    def wait(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def result(self) -> CopyResult:
        found: list[CopyResult] = []
        self.wait(lambda: bool(found.extend(self.loads.poll()) or found))
        (result,) = found
        return result


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.copier.close()
    for slab in rank.slabs:
        slab.close()
    assert rank.loads.poll() == []
    assert not rank.loads._copying


def right(rank: Rank) -> list[bool]:
    return [rank.block(i) == {100 + i} for i in range(len(LOCATIONS))]


@pytest.mark.parametrize("early", [True, False])
def test_rows_are_copied_as_they_arrive_and_the_end_is_told_once(rank: Rank, early: bool) -> None:
    if early:
        rank.load(frozenset({1}))
    rank.arrive(*FETCHED[:2])
    if not early:
        rank.load(frozenset({1}))
    rank.wait(lambda: right(rank)[2:4] == [True, True])
    rank.arrive(*FETCHED[2:])
    rank.wait(lambda: all(right(rank)[2:]))
    assert not any(right(rank)[:2])  # nobody told of these: they come last
    assert rank.loads.poll() == []
    rank.gates.settle(1, frozenset())
    result = rank.result()
    assert (result.job_id, result.ok, result.error) == (1, True, "")
    assert all(right(rank))
    assert result.nbytes == len(LOCATIONS) * rank.layout.row_bytes


@pytest.mark.parametrize("arrived", [0, 3, 6])
def test_a_fetch_that_did_not_hold_fails_the_whole_load(rank: Rank, arrived: int) -> None:
    rank.load(frozenset({1}))
    rank.arrive(*FETCHED[:arrived])
    rank.gates.settle(1, None)
    result = rank.result()
    assert not result.ok
    assert result.failed.tolist() == list(range(len(LOCATIONS)))
    assert result.error


def test_positions_that_were_lost_fail_although_something_was_copied(rank: Rank) -> None:
    rank.load(frozenset({1}))
    rank.arrive(*FETCHED[:4])
    rank.gates.settle(1, frozenset({FETCHED[0], FETCHED[5]}))
    result = rank.result()
    assert not result.ok
    assert result.failed.tolist() == [2, 7]
    assert [i for i, good in enumerate(right(rank)) if not good] in ([7], [2, 7])


def test_what_is_told_twice_is_copied_once(rank: Rank) -> None:
    rank.load(frozenset({1}))
    rank.arrive(*FETCHED)
    rank.arrive(*FETCHED)
    rank.gates.settle(1, frozenset())
    assert rank.result().nbytes == len(LOCATIONS) * rank.layout.row_bytes


def test_a_load_that_waited_too_long_fails_and_what_comes_later_is_ignored(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_module, "LONGEST_SECONDS", 0.0)
    rank.load(frozenset({1}))
    rank.arrive(*FETCHED[:2])
    assert not rank.result().ok
    before = [rank.block(i) for i in range(BLOCKS)]
    rank.arrive(*FETCHED[2:])
    rank.gates.settle(1, frozenset())
    rank.copier.wait({1})
    assert rank.loads.poll() == []
    assert [rank.block(i) for i in range(BLOCKS)] == before


def test_a_copier_for_one_thread_gets_the_load_whole(rank: Rank) -> None:
    given: list[CopyJob] = []
    copier = SimpleNamespace(
        any_thread=False, moves_slow_steps=False, submit=given.append, poll=list
    )
    rank.loads = HeldLoads(copier, rank.gates)  # type: ignore[arg-type]
    rank.load(frozenset({1, 2}))
    rank.arrive(*FETCHED)
    rank.gates.settle(1, frozenset())
    rank.loads.poll()
    assert given == []
    rank.gates.settle(2, frozenset())
    assert given == []
    rank.loads.poll()
    assert [(job.job_id, len(job)) for job in given] == [(1, len(LOCATIONS))]
    rank.loads = HeldLoads(rank.copier, rank.gates)


class Recorder:
    """A copier that says which jobs it got, and ends what it is told to."""

    any_thread = True

    def __init__(self, moves_slow_steps: bool) -> None:
        self.moves_slow_steps = moves_slow_steps
        self.given: list[int] = []
        self.ended: list[CopyResult] = []
        self.loads = HeldLoads(self, Gates())  # type: ignore[arg-type]

    def submit(self, job: CopyJob) -> None:
        self.given.append(job.job_id)

    def poll(self) -> list[CopyResult]:
        ended, self.ended = self.ended, []
        return ended

    def load(self, job_id: int) -> None:
        ids = np.zeros(1, np.int64)
        self.loads.submit(CopyJob(job_id, CopyKind.LOAD, ids, (1,), ids, ids[:0]), frozenset())

    def move(self, job_id: int) -> None:
        ids = np.zeros(1, np.int64)
        self.loads.submit_move(CopyJob(job_id, CopyKind.MOVE, ids[:0], (), ids, ~ids))

    def end(self, job_id: int, kind: CopyKind = CopyKind.LOAD) -> None:
        """End ``job_id`` and poll."""
        self.ended.append(CopyResult(job_id, kind, True, nbytes=0, seconds=0.0))
        assert [result.job_id for result in self.loads.poll()] == [job_id]


def test_moves_wait_for_the_loads_and_the_step_after_them() -> None:
    copier = Recorder(moves_slow_steps=True)
    copier.load(1)
    copier.load(2)
    copier.move(3)
    copier.end(1)
    copier.move(4)
    copier.end(2)  # the step after this poll computes what the load was for
    assert copier.given == [1, 2]
    copier.move(5)  # of that step
    assert copier.loads.poll() == []
    assert copier.given == [1, 2, 3, 4, 5]
    copier.move(6)
    assert copier.given[-1] == 6


def test_moves_wait_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_module, "MOVE_SECONDS", 0.0)
    copier = Recorder(moves_slow_steps=True)
    copier.load(1)
    copier.move(2)
    assert copier.given == [1]
    copier.loads.poll()
    assert copier.given == [1, 2]


def test_only_loads_put_moves_off_and_only_where_moves_slow_steps() -> None:
    copier = Recorder(moves_slow_steps=True)
    copier.move(1)
    copier.move(2)
    copier.end(1, CopyKind.MOVE)
    copier.move(3)
    assert copier.given == [1, 2, 3]
    beside = Recorder(moves_slow_steps=False)
    beside.load(1)
    beside.move(2)
    assert beside.given == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_arrivals_loads_and_ends(rank: Rank, seed: int) -> None:
    """Three loads over two fetches; each ends once, and holds what its fetches brought."""
    rng = random.Random(seed)
    parts = {1: FETCHED[:3], 2: FETCHED[3:]}
    lost = {i: rng.choice([None, frozenset(), frozenset({parts[i][1]})]) for i in parts}
    waits = [frozenset({1}), frozenset({2}), frozenset({1, 2})]
    steps: list[Callable[[], object]] = [
        lambda i=i, fetches=fetches: rank.load(fetches, job_id=i + 1)
        for i, fetches in enumerate(waits)
    ]
    for i, part in parts.items():
        steps += [
            lambda i=i, at=at: rank.arrive(at, fetch_id=i) for at in part if rng.random() < 0.8
        ]
    rng.shuffle(steps)
    steps += [lambda i=i: rank.gates.settle(i, lost[i]) for i in rng.sample([1, 2], 2)]
    found: list[CopyResult] = []
    for step in steps:
        step()
        found += rank.loads.poll()
    rank.wait(lambda: found.extend(rank.loads.poll()) or len(found) == len(waits))
    assert sorted(result.job_id for result in found) == [1, 2, 3]
    for result in found:
        gone = [lost[i] for i in waits[result.job_id - 1]]
        whole = set(range(len(LOCATIONS)))
        expected = (
            whole
            if None in gone
            else {i for i in whole if any(LOCATIONS[i] in part for part in gone if part)}
        )
        assert set(result.failed.tolist()) == expected
        assert result.ok == (not expected)
