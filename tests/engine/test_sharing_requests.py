"""Aborts, resets, clears and preemption while rows are read from a peer."""

from __future__ import annotations

import pytest
from checks import check_step
from faults import (
    LENGTH,
    HeldReads,
    answers_again,
    both_shapes,
    failures,
    owner_and_reader,
    quiet,
    steps,
)
from harness import Replica
from shapes import BLOCK, Shape
from sharing_cluster import Cluster, ask, finish, until
from test_bytes import prompt

from xinference_xavier.policy.columns import RowState

pytestmark = quiet

either = pytest.mark.parametrize("lands", [True, False], ids=["lands", "fails"])


def pins(replica: Replica) -> int:
    return sum(replica.manager.index.gpu.pins) + sum(replica.manager.index.cpu.pins)


def rows_in(replica: Replica, state: RowState) -> int:
    return replica.manager.index.gpu.counts[state] + replica.manager.index.cpu.counts[state]


def end(held: HeldReads, lands: bool) -> None:
    if lands:
        held.land()
    else:
        held.fail()
        held.go_on()


@both_shapes
@either
@pytest.mark.parametrize("scheduled", [0, 3], ids=["before a step", "after steps"])
@pytest.mark.parametrize("who", ["first", "joiner", "both"])
def test_abort_while_rows_are_read(
    quick_cluster: Cluster, shape: Shape, lands: bool, scheduled: int, who: str
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader, 1)
    first, joiner = (reader.ask([*prompt(1, LENGTH), number]) for number in range(2))
    steps(reader, scheduled)
    held.wait()
    for req_id in {"first": [first], "joiner": [joiner], "both": [first, joiner]}[who]:
        reader.abort(req_id)
    steps(reader, 3)
    assert pins(reader) >= 5
    end(held, lands)
    finish(reader)
    assert pins(reader) == 0
    assert failures(reader) == ({} if lands else {"read_failed": 1})
    rest = [reader.asked[req_id] for req_id in (first, joiner)]
    left = [asked.cached for asked in rest if asked.finished == "length"]
    assert left == ([] if who == "both" else [5 * BLOCK if lands else 0])
    answers_again(quick_cluster, owner, reader, 2)


@both_shapes
def test_abort_between_the_read_and_the_load(quick_cluster: Cluster, shape: Shape) -> None:
    _, reader = owner_and_reader(quick_cluster, shape)
    for rank in reader.ranks:
        rank.copier.gate.run = 0
    req_id = reader.ask(prompt(1, LENGTH))
    until(lambda: not reader.manager.planner.fetches.flying, "the bytes")
    assert pins(reader) >= 5
    steps(reader, 3)
    reader.abort(req_id)
    steps(reader, 3)
    for rank in reader.ranks:
        rank.copier.gate.open()
    finish(reader)
    assert pins(reader) == 0
    assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK
    assert reader.manager.fetching.fetches == 1


@both_shapes
def test_rows_are_kept_for_a_request_that_finds_no_kv_blocks(
    quick_cluster: Cluster, shape: Shape
) -> None:
    """Others fill the tiers meanwhile; vLLM preempts some of them."""
    owner, reader = owner_and_reader(quick_cluster, shape)
    running = [reader.ask(prompt(number, LENGTH), 60) for number in range(2, 6)]
    steps(reader, 12)
    req_id = reader.ask(prompt(1, LENGTH))
    for _ in range(60):
        reader.step()
    finish(reader)
    assert {reader.asked[each].finished for each in running} == {"length"}
    assert reader.asked[req_id].cached == 5 * BLOCK
    assert reader.manager.fetching.fetches == 1
    assert reader.manager.receipts.totals.hits_peer_blocks == 5
    assert len(owner.manager.leases) == 0


@both_shapes
def test_preempted_after_its_rows_arrived(quick_cluster: Cluster, shape: Shape) -> None:
    _, reader = owner_and_reader(quick_cluster, shape)
    asked = [reader.ask([*prompt(1, LENGTH), number], 60) for number in range(4)]
    finish(reader)
    assert any(request.num_preemptions for request in reader.requests)
    assert {reader.asked[req_id].finished for req_id in asked} == {"length"}
    assert reader.manager.fetching.fetches == 1


@both_shapes
@either
def test_reset_while_rows_are_read(quick_cluster: Cluster, shape: Shape, lands: bool) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader)
    asked = [reader.ask([*prompt(1, LENGTH), number]) for number in range(2)]
    steps(reader, 3)
    held.wait()
    reader.reset()
    check_step(reader)
    assert len(reader.manager.index) == 0
    assert rows_in(reader, RowState.ZOMBIE) >= 5
    steps(reader, 3)
    end(held, lands)
    finish(reader)
    assert rows_in(reader, RowState.ZOMBIE) == 0
    assert {reader.asked[req_id].finished for req_id in asked} == {"length"}
    answers_again(quick_cluster, owner, reader, 2)


@both_shapes
def test_a_clear_at_the_owner_during_its_lease(quick_cluster: Cluster, shape: Shape) -> None:
    """Its rows keep their bytes until the lease has ended."""
    owner, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader)
    req_id = reader.ask(prompt(1, LENGTH))
    steps(reader, 2)
    held.wait()
    owner.reset()
    leased = rows_in(owner, RowState.ZOMBIE)
    assert leased >= 5
    for number in range(2, 20):
        owner.answer(prompt(number, LENGTH))
    assert rows_in(owner, RowState.ZOMBIE) == leased
    held.land()
    finish(reader)
    assert reader.asked[req_id].cached == 5 * BLOCK
    assert rows_in(owner, RowState.ZOMBIE) == 0


@both_shapes
def test_two_replicas_read_from_each_other_at_once(quick_cluster: Cluster, shape: Shape) -> None:
    first, second = owner_and_reader(quick_cluster, shape)
    ask(second, prompt(2, LENGTH))
    quick_cluster.settle()
    there, back = HeldReads(second), HeldReads(first)
    asked = second.ask(prompt(1, LENGTH)), first.ask(prompt(2, LENGTH))
    there.wait()
    back.wait()
    there.land()
    back.land()
    finish(first)
    finish(second)
    assert second.asked[asked[0]].cached == first.asked[asked[1]].cached == 5 * BLOCK
