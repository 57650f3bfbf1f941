"""Aborts, resets and late acknowledgements while copies are in flight.

On vLLM's CPU build copies end within a step and steps do not overlap, so none of this happens there
by itself.
"""

from __future__ import annotations

import random

import pytest
from checks import check_step
from harness import MakeReplica, Replica
from shapes import BLOCK, HYBRID, TP2, Shape
from test_bytes import every_shape, prompt

from xinference_xavier.policy.columns import RowState
from xinference_xavier.storage.copier import CopyKind

LENGTH = 5 * BLOCK + 1


def hold(replica: Replica, rank: int | None = None, run: int | None = None) -> None:
    """Report nothing (and run ``run`` jobs per step) at one rank, or at all."""
    for each in replica.ranks if rank is None else [replica.ranks[rank]]:
        each.copier.gate.report = 0
        if run is not None:
            each.copier.gate.run = run


def steps(replica: Replica, count: int) -> None:
    for _ in range(count):
        replica.step()
        check_step(replica)


def rows_in(replica: Replica, state: RowState) -> int:
    index = replica.manager.index
    return index.gpu.counts[state] + index.cpu.counts[state]


@every_shape
@pytest.mark.parametrize("late", [0, 1])
def test_a_store_is_ready_when_the_last_rank_has_acknowledged(
    make_replica: MakeReplica, shape: Shape, late: int
) -> None:
    replica = make_replica(shape)
    hold(replica, late)
    replica.ask(prompt(0, LENGTH))
    steps(replica, 8)
    assert rows_in(replica, RowState.WRITING) > 0
    assert rows_in(replica, RowState.READY) == 0
    replica.run()
    assert rows_in(replica, RowState.WRITING) == 0
    assert rows_in(replica, RowState.READY) > 0


@every_shape
def test_a_request_waits_for_a_store_in_flight(make_replica: MakeReplica, shape: Shape) -> None:
    """vLLM holds a request back while its prefix is being written; others go on."""
    replica = make_replica(shape)
    hold(replica, 1)
    replica.ask(prompt(0, LENGTH))
    steps(replica, 8)
    replica.forget()
    held, other = replica.ask(prompt(0, LENGTH)), replica.ask(prompt(1, LENGTH))
    steps(replica, 8)
    assert replica.asked[other].finished == "length"
    assert replica.asked[held].cached is None
    replica.run()
    assert replica.asked[held].cached == 5 * BLOCK


@every_shape
@pytest.mark.parametrize("run", [0, 1], ids=["before the copy", "after the copy"])
def test_abort_while_loading(make_replica: MakeReplica, shape: Shape, run: int) -> None:
    replica = make_replica(shape)
    replica.answer(prompt(0, LENGTH))
    replica.forget()
    hold(replica, run=run)
    req_id = replica.ask(prompt(0, LENGTH))
    steps(replica, 3)
    index = replica.manager.index
    assert sum(index.gpu.pins) + sum(index.cpu.pins) > 0
    replica.abort(req_id)
    steps(replica, 3)
    # Its KV blocks are still being written: neither they nor the rows may be reused.
    assert sum(index.gpu.pins) + sum(index.cpu.pins) > 0
    again = replica.ask(prompt(0, LENGTH))
    steps(replica, 3)
    replica.run()
    assert replica.asked[again].cached == 5 * BLOCK


@every_shape
@pytest.mark.parametrize("run", [0, 1], ids=["before the copy", "after the copy"])
def test_reset_with_a_store_in_flight(make_replica: MakeReplica, shape: Shape, run: int) -> None:
    """Rows are zombies until every rank has acknowledged, then free; the key does not return."""
    replica = make_replica(shape)
    hold(replica, run=run)
    replica.ask(prompt(0, LENGTH))
    steps(replica, 6)
    writing = rows_in(replica, RowState.WRITING)
    assert writing > 0
    replica.reset()
    check_step(replica)
    assert len(replica.manager.index) == 0
    assert rows_in(replica, RowState.ZOMBIE) == writing
    for rank in replica.ranks[:-1]:
        rank.copier.gate.open()
    steps(replica, 4)
    assert rows_in(replica, RowState.ZOMBIE) == writing  # one rank has not acknowledged
    replica.run()
    assert rows_in(replica, RowState.ZOMBIE) == 0
    assert rows_in(replica, RowState.READY) == 0


@every_shape
def test_reset_with_a_load_in_flight(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(shape)
    replica.answer(prompt(0, LENGTH))
    replica.forget()
    hold(replica, 1)
    req_id = replica.ask(prompt(0, LENGTH), 3)
    steps(replica, 3)
    pinned = sum(replica.manager.index.gpu.pins) + sum(replica.manager.index.cpu.pins)
    assert pinned > 0
    replica.reset()
    check_step(replica)
    assert len(replica.manager.index) == 0
    assert rows_in(replica, RowState.ZOMBIE) == pinned
    replica.run()
    assert replica.asked[req_id].finished == "length"
    assert rows_in(replica, RowState.ZOMBIE) == 0


@every_shape
@pytest.mark.parametrize("run", [0, 1], ids=["before the copy", "after the copy"])
def test_reset_with_a_move_in_flight(make_replica: MakeReplica, shape: Shape, run: int) -> None:
    replica = make_replica(shape)
    number = 0
    while not replica.moves_in_flight():
        hold(replica, run=run)
        replica.ask(prompt(number, LENGTH))
        steps(replica, 6)
        number += 1
        for rank in replica.ranks:  # let stores through, hold moves
            jobs = [*rank.copier.waiting, *rank.copier.ended]
            if not any(job.kind is CopyKind.MOVE for job in jobs):
                rank.copier.gate.open()
        steps(replica, 2)
        assert number < 12
    hold(replica, run=run)
    replica.reset()
    check_step(replica)
    assert len(replica.manager.index) == 0
    replica.run()
    counters = replica.counters
    assert rows_in(replica, RowState.ZOMBIE) == 0
    assert rows_in(replica, RowState.ARRIVING) == 0
    assert counters.failed_copies == 0


@pytest.mark.parametrize("shape", [TP2, HYBRID], ids=["tp2", "hybrid"])
def test_reset_while_requests_run(make_replica: MakeReplica, shape: Shape) -> None:
    """vLLM preempts everything, forgets its jobs and starts the requests over.

    It refuses to while steps overlap.
    """
    replica = make_replica(shape)
    hold(replica, 1)
    req_ids = [replica.ask(prompt(number, LENGTH), 9) for number in range(2)]
    steps(replica, 4)
    replica.reset(preempt=True)
    check_step(replica)
    steps(replica, 4)
    replica.run()
    assert {replica.asked[req_id].finished for req_id in req_ids} == {"length"}


@every_shape
def test_abort_in_mid_prefill_stores_only_what_was_computed(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    req_id = replica.ask(prompt(0, 60), 4)  # two steps of 32 tokens
    replica.step()
    replica.step(abort_late=[req_id])
    replica.run()
    check_step(replica)
    replica.forget()
    cached = replica.answer(prompt(0, 60)).cached
    assert cached is not None
    assert cached <= 60 // BLOCK * BLOCK


@every_shape
@pytest.mark.parametrize("seed", range(3))
def test_acknowledgements_in_any_order(make_replica: MakeReplica, shape: Shape, seed: int) -> None:
    replica = make_replica(shape)
    for rank in replica.ranks:
        rank.copier.gate.shuffle = random.Random(seed * 10 + rank.number)
        rank.copier.gate.run = 1 + rank.number
        rank.copier.gate.report = 1
    for number in range(6):
        replica.ask(prompt(number % 4, LENGTH + number), 3)
        steps(replica, 4)
        if number % 2:
            replica.scheduler.reset_prefix_cache()
    replica.run()
    assert replica.counters.stored_gpu > 0


def test_reset_offers_no_block_that_has_left_the_window(make_replica: MakeReplica) -> None:
    """A block behind a sliding window is freed while its request runs, and soon somebody else's."""
    replica = make_replica(HYBRID)
    replica.ask(prompt(0, 4 * BLOCK), 60)
    for number in range(1, 6):
        replica.ask(prompt(number, 2 * BLOCK), 3)
        steps(replica, 8)
        replica.reset()
    replica.run()
