"""Kinds of faults seen in caches like this one, in one replica: late, failing and unequal ranks.

What is wrong shows in the bytes: the harness compares every slot that the model reads, and every
row of every rank after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from checks import check_rest, check_step
from harness import MakeReplica, Replica
from shapes import BLOCK, TP2, Shape
from test_bytes import OVERLAPPED, every_shape, prompt

from xinference_xavier.engine.sizing import RankBudget
from xinference_xavier.policy.columns import RowState
from xinference_xavier.storage.copier import CopyKind
from xinference_xavier.storage.faults import ENV_FAULTS

LENGTH = 5 * BLOCK + 1


def run_checked(replica: Replica, limit: int = 300) -> None:
    for _ in range(limit):
        if not replica.busy:
            return
        replica.step()
        check_step(replica)
    raise AssertionError("never ends")


@every_shape
def test_a_store_that_is_late_reads_what_was_computed(
    make_replica: MakeReplica, shape: Shape
) -> None:
    """The model writes on: its blocks are handed out again long before a copy would begin."""
    replica = make_replica(replace(shape, gpu_rows=40, cpu_rows=80))
    replica.ranks[0].copier.gate.run = 0
    replica.ranks[1].copier.gate.run = 1
    written = 0
    for number in range(8):  # more blocks than the pool has
        replica.ask(prompt(number, LENGTH), 3)
        for _ in range(4):
            replica.step()
            check_step(replica)
            index = replica.manager.index
            written = max(written, index.gpu.counts[RowState.WRITING])
    assert written > 5, "no store was late"
    replica.run()
    check_step(replica)
    late = replica.ranks[0].copier.done[CopyKind.STORE, True]
    assert late == replica.ranks[1].copier.done[CopyKind.STORE, True] >= 8
    for number in range(8):
        replica.forget()
        assert replica.answer(prompt(number, LENGTH)).cached == 5 * BLOCK


@pytest.mark.parametrize("shape", [TP2, OVERLAPPED], ids=["tp2", "overlapped"])
@pytest.mark.parametrize("rank", ["", "@rank0", "@rank1"])
def test_the_third_move_and_the_third_load_raise(
    make_replica: MakeReplica, shape: Shape, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the copier itself, on one rank or on all."""
    monkeypatch.setenv(ENV_FAULTS, f"move:3{rank},load:3{rank}")
    replica = make_replica(shape)
    for turn in range(3):
        for number in range(4):
            replica.forget()
            asked = replica.asked[replica.ask(prompt(number, LENGTH), 2)]
            run_checked(replica)
            assert asked.finished == "length"
            assert turn == 0 or asked.cached in (0, 5 * BLOCK)
    assert replica.counters.failed_copies == 2
    assert replica.counters.demotions > 0
    failing = replica.ranks[int(rank[-1])] if rank else replica.ranks[0]
    assert failing.copier.done[CopyKind.LOAD, False] == 1
    assert failing.copier.done[CopyKind.MOVE, False] == 1
    replica.forget()
    assert replica.answer(prompt(0, LENGTH)).cached == 5 * BLOCK


@every_shape
def test_a_batch_larger_than_what_can_be_evicted_keeps_its_head(
    make_replica: MakeReplica, shape: Shape
) -> None:
    """In order, and no block of it makes room for a later one."""
    replica = make_replica(replace(shape, gpu_rows=4, cpu_rows=6, blocks=61))
    for number in range(3):  # the tiers are full of others
        replica.answer(prompt(number, LENGTH))
    req_id = replica.ask(prompt(9, 20 * BLOCK + 1), 2)
    run_checked(replica)
    (request,) = (r for r in replica.requests if r.request_id == req_id)
    first = [bytes(block_hash) + bytes(4) for block_hash in request.block_hashes]
    kept = [key in replica.manager.index for key in first]
    assert kept == sorted(kept, reverse=True), "a hole"
    assert 0 < sum(kept) <= 10
    assert replica.manager.planner.counters.skips["prompt_exceeds_tier"] > 0
    replica.forget()
    again = replica.answer(prompt(9, 20 * BLOCK + 1))
    assert again.cached is not None
    assert again.cached <= sum(kept) * BLOCK
    if len(replica.manager.block_tokens) == 1:
        assert again.cached == sum(kept) * BLOCK


@pytest.mark.parametrize("poor", [0, 1])
def test_ranks_with_different_free_memory_decide_the_same(
    make_replica: MakeReplica, poor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank with least memory decides; what the other one has beyond that is not used."""
    real: Callable[..., int] = RankBudget.cpu_rows
    asked: list[int] = []

    def cpu_rows(self: RankBudget, *sizes: Any) -> int:
        asked.append(real(self, *sizes))
        return 15 if len(asked) - 1 == poor else asked[-1]

    monkeypatch.setattr(RankBudget, "cpu_rows", cpu_rows)
    replica = make_replica(TP2)
    assert asked == [60, 60]
    assert replica.manager.index.cpu.rows == 15
    for number in range(8):
        replica.ask(prompt(number, LENGTH), 2)
        run_checked(replica)
    assert replica.counters.evictions_cpu > 0
    assert replica.counters.failed_copies == 0
    first, second = (rank.copier.done for rank in replica.ranks)
    assert first == second
    check_rest(replica)
