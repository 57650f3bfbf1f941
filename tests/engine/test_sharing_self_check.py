"""The self-check between replicas: rows that rotted, at their owner or on their way, do not count.

Here every block has a checksum, and the harness compares every slot that the model reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from faults import LENGTH, answers_again, both_shapes, failures, owner_and_reader, quiet, transport
from harness import Replica
from shapes import BLOCK, TP2, Shape
from sharing_cluster import Cluster, ask, finish, member_of, sharing_of, until, usable
from test_bytes import prompt

from xinference_xavier.policy.keys import group_of

pytestmark = quiet

either_rank = pytest.mark.parametrize("rank", [0, 1])


def rot(replica: Replica, rank: int, position: int, number: int = 0) -> bytes:
    """Flip a bit of the row that holds a request's block; its key."""
    block_hash = bytes(replica.requests[number].block_hashes[position])
    key = next(k for k in tuple(replica.manager.keys()) if k[:-4] == block_hash and not group_of(k))
    copier = replica.ranks[rank].copier.inner
    memory, row = copier._rows.resolve(np.array([replica.manager.index.where(key)]))
    page = copier._layout.groups[0][-1]
    copier._memories[memory[0]][row[0], page.offset] ^= 1
    return key


def forgive(replica: Replica) -> None:
    """What was found is what the test made: the checks at its end want none."""
    replica.manager.mismatches = 0
    for rank in replica.ranks:
        rank.copier.inner._check.mismatches = 0


def step_until_forgotten(owner: Replica, key: bytes) -> None:
    """A real engine is woken; here the test takes its steps."""

    def forgotten() -> bool:
        owner.connector._steering.step()
        return key not in owner.manager.index

    until(forgotten, "the owner to forget what rotted")


@both_shapes
@either_rank
def test_a_row_that_rotted_at_its_owner_is_served_to_nobody(
    quick_cluster: Cluster, shape: Shape, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    key = rot(owner, rank, 2)
    asked = [reader.ask([*prompt(1, LENGTH), number]) for number in range(3)]
    finish(reader)
    assert {reader.asked[req_id].finished for req_id in asked} == {"length"}
    assert failures(reader) == {"mismatch": 1}
    assert reader.manager.mismatches == 1
    assert caplog.text.count("the self-check found other bytes") == 1
    step_until_forgotten(owner, key)
    assert owner.manager.doubted == 1
    quick_cluster.settle()
    assert usable(reader) == (member_of(owner),)  # it is not left alone for it
    # Both have it again, as it should be, from whoever computed it.
    reader.forget()
    assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK
    assert ask(owner, prompt(1, LENGTH)).cached == 5 * BLOCK
    forgive(reader)


@contextmanager
def corrupted_reads(replica: Replica, rank: int) -> Iterator[None]:
    """A byte of everything that a rank reads changes on its way."""
    door, copier = transport(replica, rank), replica.ranks[rank].copier.inner
    real = door.read

    def read(peer, sources, targets, *rest):  # type: ignore[no-untyped-def]
        found = real(peer, sources, targets, *rest)
        found.settled.result(20)
        memory, rows = copier._rows.resolve(targets)
        page = copier._layout.groups[0][0]
        for number, row in zip(memory, rows, strict=True):
            copier._memories[number][row, page.offset + page.nbytes - 1] ^= 0x80
        return found

    door.read = read
    try:
        yield
    finally:
        door.read = real


@either_rank
def test_bytes_that_change_on_their_way_do_not_count(quick_cluster: Cluster, rank: int) -> None:
    owner, reader = owner_and_reader(quick_cluster, TP2)
    with corrupted_reads(reader, rank):
        assert ask(reader, prompt(1, LENGTH)).cached == 0
    assert failures(reader) == {"mismatch": 1}
    assert reader.manager.mismatches == 5
    assert reader.manager.index.gpu.snapshots + reader.manager.index.cpu.snapshots == 5  # computed
    forgive(reader)
    owner.connector._steering.step()


def test_what_a_peer_stored_is_verified_here_and_told_on(quick_cluster: Cluster) -> None:
    """A row that was fetched keeps its checksum: it rots here, and the next load finds it."""
    _, reader = owner_and_reader(quick_cluster, TP2)
    assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK
    rot(reader, 1, 3)
    reader.forget()
    assert ask(reader, prompt(1, LENGTH)).cached == 3 * BLOCK
    assert reader.manager.mismatches == 1
    assert failures(reader) == {}
    forgive(reader)


@either_rank
def test_a_rank_that_never_verifies_costs_a_miss(quick_cluster: Cluster, rank: int) -> None:
    """In bounded time, and the peer is not left alone for it."""
    owner, reader = owner_and_reader(quick_cluster, TP2)
    checks = reader.ranks[rank].copier.inner.row_check
    over = threading.Event()

    def never(*_: object) -> list[int]:
        over.wait(20)
        return []

    with mock.patch.object(checks, "wrong", never):
        assert ask(reader, prompt(1, LENGTH)).cached == 0
        over.set()
    assert failures(reader) == {"not_verified": 1}
    assert usable(reader) == (member_of(owner),)
    answers_again(quick_cluster, owner, reader, 2)


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_without_it_on_either_side_nothing_is_compared(quick_cluster: Cluster, side: str) -> None:
    owner, reader = owner_and_reader(quick_cluster, TP2)
    one = owner if side == "owner" else reader
    setup = sharing_of(one)._setup
    sharing_of(one)._setup = replace(setup, checks=False)
    fetcher = sharing_of(one)._fetcher
    assert fetcher is not None
    fetcher._checks = False
    checks = [rank.copier.inner._check for rank in reader.ranks]
    verified = [check.verified for check in checks]
    assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK
    assert [check.verified for check in checks] == verified
