"""The owner of a prefix fails: the reader computes, answers rightly, and loses no row for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from faults import (
    LENGTH,
    HeldReads,
    answers_again,
    both_shapes,
    destroy_replica_actor,
    failing_reads,
    failures,
    frozen_mirror,
    owner_and_reader,
    quiet,
    remembered_peers,
    silent_leases,
    steps,
    stop_bridge,
)
from harness import Replica
from shapes import BLOCK, TP2, Shape
from sharing_cluster import Cluster, ask, finish, member_of, sharing_of, until, usable
from test_bytes import prompt

from xinference_xavier.actors.registry import PeerEntry

pytestmark = quiet


def least_cached(replica: Replica, req_ids: Sequence[str]) -> int:
    """Of the first that is computed; the others may hit what it has computed."""
    return min(replica.asked[req_id].cached or 0 for req_id in req_ids)


def peers_of(replica: Replica) -> list[PeerEntry]:
    peers = sharing_of(replica).peers
    assert peers is not None
    return peers.entries()


@both_shapes
def test_the_owner_is_gone_before_the_lease(
    quick_cluster: Cluster, shape: Shape, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    with frozen_mirror(reader), remembered_peers(reader):
        stop_bridge(owner)
        asked = [reader.ask(prompt(1, LENGTH)) for _ in range(3)]
        finish(reader)
        assert least_cached(reader, asked) == 0
        assert failures(reader) == {"lease_failed": 1}
        assert usable(reader) == ()
        ask(reader, prompt(2, LENGTH))
        time.sleep(1.0)  # several pauses end; meeting it fails each time
        assert reader.manager.fetching.fetches == 1
    until(lambda: not peers_of(reader), "the owner to be forgotten")
    assert caplog.text.count("cannot be read from") == 1


@both_shapes
def test_the_owners_actor_is_destroyed(
    quick_cluster: Cluster, shape: Shape, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    destroy_replica_actor(owner)
    until(lambda: "is made again" in caplog.text, "the owner to notice")
    answers_again(quick_cluster, owner, reader, 3)
    assert set(failures(reader)) <= {"lease_failed"}


@both_shapes
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_the_owner_is_gone_while_its_rows_are_read(
    quick_cluster: Cluster, shape: Shape, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory is still there, but nobody says that the bytes were good."""
    owner, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader, 1)
    req_id = reader.ask(prompt(1, LENGTH))
    steps(reader, 2)
    held.wait()
    assert len(owner.manager.leases) == 1
    with nullcontext() if known else remembered_peers(reader):
        stop_bridge(owner)
        if known:
            until(lambda: not peers_of(reader), "the owner to be forgotten")
        held.land()
        finish(reader)
    assert reader.asked[req_id].cached == 0
    assert failures(reader) == {"peer_gone" if known else "lease_lost": 1}
    assert "cannot be read from" not in caplog.text  # it left: nothing to worry about
    owner.manager.leases.expire(float("inf"))  # its process would be gone


@both_shapes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_fails_on_one_rank(
    quick_cluster: Cluster, shape: Shape, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xinference_xavier")
    owner, reader = owner_and_reader(quick_cluster, shape)
    heal = failing_reads(reader, rank)
    asked = [reader.ask([*prompt(1, LENGTH), number]) for number in range(6)]
    finish(reader)
    assert {reader.asked[req_id].finished for req_id in asked} == {"length"}
    assert failures(reader) == {"read_failed": 1}
    assert len(owner.manager.leases) == 0
    heal()
    answers_again(quick_cluster, owner, reader, 2)
    assert caplog.text.count("cannot be read from (read_failed: the connection broke)") == 1
    assert caplog.text.count("is read from again") == 1


@both_shapes
def test_an_owner_that_never_answers_is_left_alone(quick_cluster: Cluster, shape: Shape) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    with silent_leases(owner) as calls:
        began = time.monotonic()
        assert ask(reader, prompt(1, LENGTH)).cached == 0
        assert time.monotonic() - began < 2.0
        assert failures(reader) == {"lease_failed": 1}
        for number in range(2, 5):
            ask(reader, prompt(number, LENGTH))
        assert calls.acquire(timeout=1)
        assert not calls.acquire(timeout=0.01)
    answers_again(quick_cluster, owner, reader, 5)


@both_shapes
def test_a_lease_that_ends_during_the_read_does_not_count(
    quick_cluster: Cluster, shape: Shape
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    fetcher = sharing_of(reader)._fetcher
    assert fetcher is not None
    fetcher._borrower._ttl_seconds = 0.05
    held = HeldReads(reader)
    req_id = reader.ask(prompt(1, LENGTH))
    steps(reader, 2)
    held.wait()
    until(lambda: owner.manager.leases.expired == 1, "the lease to end")
    for number in range(2, 14):  # its rows are written anew
        owner.answer(prompt(number, LENGTH))
    held.land()
    finish(reader)
    assert reader.asked[req_id].cached == 0
    assert failures(reader) == {"lease_lost": 1}
    assert reader.manager.index.gpu.snapshots + reader.manager.index.cpu.snapshots > 0
    fetcher._borrower._ttl_seconds = 30
    assert usable(reader) == (member_of(owner),)


@both_shapes
@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "evicted"])
def test_what_turned_out_stale_is_not_asked_for_again(
    quick_cluster: Cluster, shape: Shape, cleared: bool
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    with frozen_mirror(reader):
        if cleared:
            owner.reset()
        else:
            for number in range(2, 30):
                owner.answer(prompt(number, LENGTH))
        assert ask(reader, prompt(1, LENGTH)).cached == 0
        assert failures(reader) == {"stale": 1}
        reader.reset()
        assert ask(reader, prompt(1, LENGTH)).cached == 0
        assert (reader.manager.fetching.fetches, failures(reader)) == (1, {"stale": 1})
        assert usable(reader) == (member_of(owner),)
    answers_again(quick_cluster, owner, reader, 31)


@pytest.mark.parametrize("gone", [[0], [4], [2], [0, 1], [1, 4]], ids=str)
@both_shapes
def test_a_lease_for_some_of_the_blocks(
    quick_cluster: Cluster, shape: Shape, gone: list[int]
) -> None:
    """What is there is read, up to the first gap it is a hit."""
    owner, reader = owner_and_reader(quick_cluster, shape)
    hashes = [bytes(block_hash) for block_hash in owner.requests[0].block_hashes]
    with frozen_mirror(reader):
        with owner.manager.lock:
            for key in tuple(owner.manager.keys()):
                if hashes.index(key[:-4]) in gone and key[-4:] == bytes(4):
                    owner.manager.index.remove(key)
        asked = [reader.ask([*prompt(1, LENGTH), number]) for number in range(3)]
        finish(reader)
        assert failures(reader) == {"stale": 1}
        if shape is TP2:  # a window at the end of the rest is not there
            assert least_cached(reader, asked) == gone[0] * BLOCK
        reader.forget()
        assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK
        assert reader.manager.fetching.fetches == 1
