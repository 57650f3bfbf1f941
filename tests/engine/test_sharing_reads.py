"""Reads that end late, or whose rank's own actor is gone: no row is used while bytes may land."""

from __future__ import annotations

import pytest
from checks import check_step
from faults import (
    LENGTH,
    HeldReads,
    answers_again,
    both_shapes,
    destroy_tier_actor,
    failures,
    owner_and_reader,
    quiet,
    steps,
    tier_server,
)
from harness import Replica
from shapes import BLOCK, TP2, Shape
from sharing_cluster import Cluster, ask, finish, until, usable
from test_bytes import prompt

pytestmark = quiet

either_rank = pytest.mark.parametrize("rank", [0, 1])


def quarantined(replica: Replica) -> int:
    return replica.manager.planner.fetches.quarantined_rows


def end_quarantine(replica: Replica) -> None:
    """For the check at the end: here nobody could say when it is over."""
    fetches = replica.manager.planner.fetches
    for fetch_id in list(fetches._quarantined):
        fetches.settle(fetch_id)


def free_rows(replica: Replica) -> int:
    return replica.manager.index.gpu.free + replica.manager.index.cpu.free


@both_shapes
@either_rank
def test_bytes_that_land_late_meet_no_row_in_use(
    quick_cluster: Cluster, shape: Shape, rank: int
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader, rank, late=True)
    asked = [reader.ask([*prompt(1, LENGTH), number]) for number in range(3)]
    finish(reader)
    assert {reader.asked[req_id].finished for req_id in asked} == {"length"}
    assert failures(reader) == {"timed_out": 1}
    rows = quarantined(reader)
    assert rows >= 5
    for number in range(2, 30):  # everything else is written over and over
        reader.answer(prompt(number, LENGTH))
    assert quarantined(reader) == rows
    held.land()
    until(lambda: not quarantined(reader), "the rows to be free again")
    check_step(reader)
    answers_again(quick_cluster, owner, reader, 30)


def test_above_the_cap_nothing_more_is_fetched(quick_cluster: Cluster) -> None:
    """Rows that cannot be had back are a quarter of all rows at most."""
    owner, reader = owner_and_reader(quick_cluster, TP2)
    held = HeldReads(reader, late=True)
    rows = TP2.gpu_rows + TP2.cpu_rows
    number = 1
    while quarantined(reader) + 5 <= rows // 4:
        before = quarantined(reader)
        ask(reader, prompt(number, LENGTH))
        assert quarantined(reader) == before + 5
        number += 1
        ask(owner, prompt(number, LENGTH))
        quick_cluster.settle()
        until(lambda: usable(reader), "the owner to be asked again")
    fetches = reader.manager.fetching.fetches
    reader.manager.fetching._min_tokens = LENGTH  # less than the whole is not worth it
    ask(reader, prompt(number, LENGTH))
    assert reader.manager.fetching.fetches == fetches
    assert reader.manager.fetching.skipped["too_short"] + reader.manager.fetching.skipped["no_room"]
    held.land()
    until(lambda: not quarantined(reader), "the rows to be free again")
    reader.manager.fetching._min_tokens = "auto"
    answers_again(quick_cluster, owner, reader, number + 1)


@both_shapes
@either_rank
def test_a_rank_that_answers_nothing_while_it_reads(
    quick_cluster: Cluster, shape: Shape, rank: int
) -> None:
    """Its call is given up and cancelled; the read is not, and keeps its rows."""
    owner, reader = owner_and_reader(quick_cluster, shape)
    reader.manager.fetching.rates.deadline_seconds = lambda tokens: 0.1  # type: ignore[method-assign]
    held = HeldReads(reader, rank)
    req_id = reader.ask(prompt(1, LENGTH))
    finish(reader)
    assert reader.asked[req_id].cached == 0
    assert failures(reader) == {"timed_out": 1}
    assert quarantined(reader) >= 5
    reader.reset()
    for number in range(2, 20):
        reader.answer(prompt(number, LENGTH))
    for _, arguments in held._held:
        assert len(arguments[2]) == quarantined(reader)
    held._held = [(read, (*arguments[:3], 5.0)) for read, arguments in held._held]
    held.land()
    until(lambda: not quarantined(reader), "the rows to be free again")
    check_step(reader)
    del reader.manager.fetching.rates.deadline_seconds
    answers_again(quick_cluster, owner, reader, 20)


@both_shapes
@either_rank
def test_the_actor_of_a_rank_is_gone(
    quick_cluster: Cluster, shape: Shape, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    destroy_tier_actor(reader, rank)
    free = free_rows(reader)
    asked = [reader.ask([*prompt(1, LENGTH), number]) for number in range(3)]
    finish(reader)
    assert {reader.asked[req_id].finished for req_id in asked} == {"length"}
    assert quarantined(reader) == 0
    reader.reset()
    assert free_rows(reader) == free
    fetches = reader.manager.fetching.fetches
    ask(reader, prompt(1, LENGTH))
    assert reader.manager.fetching.fetches == fetches
    assert caplog.text.count("nothing is read from peers any more") == 1
    ask(reader, prompt(2, LENGTH))  # its own snapshots are still there for others
    quick_cluster.settle()
    assert ask(owner, prompt(2, LENGTH)).cached == 5 * BLOCK


@both_shapes
def test_the_pool_of_a_rank_stops_in_the_middle(quick_cluster: Cluster, shape: Shape) -> None:
    """Nobody can say whether its read still lands: its rows are given up, and counted."""
    _, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader, 1)
    req_id = reader.ask(prompt(1, LENGTH))
    steps(reader, 2)
    held.wait()
    tier_server(reader, 1).close(20)
    finish(reader)
    assert reader.asked[req_id].cached == 0
    assert failures(reader) == {"timed_out": 1}
    rows = quarantined(reader)
    assert rows >= 5
    ask(reader, prompt(2, LENGTH))
    assert quarantined(reader) == rows
    assert reader.manager.fetching.fetches == 1
    held.fail()
    end_quarantine(reader)


@both_shapes
def test_the_bridge_ends_while_rows_are_read(quick_cluster: Cluster, shape: Shape) -> None:
    """Loads that wait are told with the next step."""
    _, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader, 0)
    req_id = reader.ask(prompt(1, LENGTH))
    steps(reader, 2)
    held.wait()
    reader.connector._bridge.close(20)
    finish(reader)
    assert reader.asked[req_id].cached == 0
    assert failures(reader) == {"bridge_gone": 1}
    assert quarantined(reader) >= 5
    ask(reader, prompt(1, LENGTH))
    held.fail()
    fetches = reader.manager.planner.fetches
    for fetch_id in list(fetches._quarantined):
        fetches.settle(fetch_id)
