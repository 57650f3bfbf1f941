"""Kinds of faults seen in caches like this one, between replicas."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from faults import (
    LENGTH,
    HeldReads,
    answers_again,
    failures,
    owner_and_reader,
    quiet,
    silent_leases,
    steps,
    stop_bridge,
)
from harness import Replica
from shapes import BLOCK, TP2
from sharing_cluster import Cluster, ask, finish, member_of, sharing_of, until, usable
from test_bytes import prompt

from xinference_xavier.policy import directory, fingerprints, mirror

pytestmark = quiet


def text(number: int, blocks: int = 3) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(1, 250) for _ in range(blocks * BLOCK + 1)]


def free_rows(replica: Replica) -> int:
    index = replica.manager.index
    return index.gpu.free + index.gpu.snapshots + index.cpu.free + index.cpu.snapshots


def test_fingerprints_of_eight_bits_mislead_nobody_into_a_wrong_hit(
    quick_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly every key seems to be at the peer. Full keys are compared where the bytes are."""

    def eight_bits(key: bytes) -> int:
        return fingerprints.fingerprint(key) % 255 + 1

    for module in (directory, mirror):
        monkeypatch.setattr(module, "fingerprint", eight_bits)
    monkeypatch.setattr(mirror, "fingerprints", lambda keys: [eight_bits(key) for key in keys])
    owner, reader = quick_cluster.add(replace(TP2, cpu_rows=200)), quick_cluster.add(TP2)
    quick_cluster.acquaint()
    for number in range(60):
        owner.answer(text(number))
    told = sharing_of(reader).mirror
    keys = tuple(owner.manager.keys())
    until(lambda: all(told.holds(member_of(owner), key) for key in keys), "the mirror to follow")
    for number in range(300):
        strange = number % 4 != 0
        asked = reader.asked[reader.ask(text(1000 + number if strange else number // 4))]
        finish(reader)
        assert asked.cached in ((0,) if strange else (0, BLOCK, 2 * BLOCK, 3 * BLOCK))
    assert failures(reader)["stale"] > 20
    assert set(failures(reader)) == {"stale"}
    assert reader.manager.receipts.totals.tokens_peer > 0


def test_a_hundred_requests_are_aborted_while_they_wait_for_a_silent_peer(
    quick_cluster: Cluster,
) -> None:
    owner, reader = owner_and_reader(quick_cluster, TP2)
    rows = free_rows(reader)
    with silent_leases(owner) as calls:
        asked = [reader.ask([*prompt(1, LENGTH), 1 + number]) for number in range(100)]
        assert calls.acquire(timeout=20)
        steps(reader, 3)
        for req_id in asked:
            reader.abort(req_id)
        finish(reader)
        until(lambda: not reader.manager.planner.fetches.flying, "the lease to be given up")
    pool = reader.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == TP2.blocks - 1
    assert free_rows(reader) == rows
    assert not reader.manager.requests
    assert failures(reader) == {"lease_failed": 1}
    answers_again(quick_cluster, owner, reader, 2)


def test_rows_of_a_consumer_that_never_releases_return_after_the_lease(
    quick_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was killed: no call of its comes any more."""
    owner, reader = owner_and_reader(quick_cluster, TP2)
    fetcher = sharing_of(reader)._fetcher
    assert fetcher is not None

    async def vanish(loan: object) -> bool:
        return False

    monkeypatch.setattr(fetcher._borrower, "_ttl_seconds", 1.0)
    monkeypatch.setattr(fetcher._borrower, "release", vanish)
    assert ask(reader, prompt(1, LENGTH)).cached == 0
    assert failures(reader) == {"lease_lost": 1}
    leases = owner.manager.leases
    assert (len(leases), leases.rows) == (1, 5)
    room = leases.room(member_of(reader))
    until(lambda: not leases.rows, "the lease to end")
    assert leases.expired == 1
    assert leases.room(member_of(reader)) == room + 5
    assert not any(owner.manager.index.gpu.pins)


def test_a_peer_restarts_while_twenty_fetches_are_wanted_from_it(quick_cluster: Cluster) -> None:
    shape = replace(TP2, cpu_rows=400)
    owner, reader = quick_cluster.pair(shape)
    for number in range(20):
        owner.answer(text(number))
    quick_cluster.settle()
    held = HeldReads(reader, 1)
    asked = [reader.ask(text(number), 2) for number in range(20)]
    held.wait(20)
    steps(reader, 2)
    stop_bridge(owner)
    quick_cluster.replicas.remove(owner)
    successor = quick_cluster.add_as(shape, 0)
    held.land()
    finish(reader)
    assert {reader.asked[req_id].finished for req_id in asked} == {"length"}
    assert sum(failures(reader).values()) == 20
    assert set(failures(reader)) <= {"lease_lost", "peer_gone"}
    owner.manager.leases.expire(float("inf"))  # its process would be gone
    until(lambda: usable(reader) == (member_of(successor),), "the successor to be met")
    ask(successor, text(100))
    quick_cluster.settle()
    assert ask(reader, text(100)).cached == 3 * BLOCK
