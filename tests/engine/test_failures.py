"""Copies that fail on one of two ranks: requests are answered, no wrong byte stays, one counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checks import check_step
from harness import MakeReplica, Replica
from shapes import BLOCK, HYBRID, TP2, Shape
from test_bytes import OVERLAPPED, SHAPES, every_shape, prompt
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from xinference_xavier.policy.planner import group_of
from xinference_xavier.storage.copier import CopyKind

LENGTH = 5 * BLOCK + 1
either_rank = pytest.mark.parametrize("failing", [0, 1])


def keys_of(replica: Replica, req_id: str) -> set[bytes]:
    """Keys of a request's blocks that the index holds, of all KV groups."""
    hashes = {bytes(h) for r in replica.requests if r.request_id == req_id for h in r.block_hashes}
    return {key for key in tuple(replica.manager.index.keys()) if key[:-4] in hashes}


@every_shape
@either_rank
def test_a_failed_store_leaves_no_key(
    make_replica: MakeReplica, shape: Shape, failing: int
) -> None:
    replica = make_replica(shape)
    replica.ranks[failing].copier.gate.fail(CopyKind.STORE)
    asked = replica.answer(prompt(0, LENGTH))
    assert asked.finished == "length"
    assert replica.counters.failed_copies == 1
    assert not keys_of(replica, "r0")
    assert replica.manager.index.gpu.snapshots == replica.manager.index.cpu.snapshots == 0
    check_step(replica)
    replica.forget()
    assert replica.answer(prompt(0, LENGTH)).cached == 0  # computed anew, and stored this time
    replica.forget()
    assert replica.answer(prompt(0, LENGTH)).cached == 5 * BLOCK
    assert replica.counters.failed_copies == 1


@every_shape
@either_rank
def test_a_failed_move_leaves_the_snapshot_where_it_was(
    make_replica: MakeReplica, shape: Shape, failing: int
) -> None:
    replica = make_replica(shape)
    replica.ranks[failing].copier.gate.fail(CopyKind.MOVE)
    number = 0
    while not replica.counters.failed_copies:
        replica.answer(prompt(number, LENGTH))
        check_step(replica)
        number += 1
        assert number < 8
    counters = replica.counters
    assert counters.failed_copies == 1
    assert counters.evictions_gpu == counters.evictions_cpu == 0
    for again in range(number):
        replica.forget()
        assert replica.answer(prompt(again, LENGTH)).cached == 5 * BLOCK
        check_step(replica)
    assert counters.failed_copies == 1
    assert counters.demotions > 0


@every_shape
@either_rank
@pytest.mark.parametrize("tier", ["gpu", "cpu"])
@pytest.mark.parametrize("positions", [None, [0], [2], [4], [1, 3]], ids=str)
def test_a_failed_load_is_computed(
    make_replica: MakeReplica, shape: Shape, failing: int, tier: str, positions: list[int] | None
) -> None:
    replica = make_replica(replace(shape, gpu_rows=0) if tier == "cpu" else shape)
    replica.answer(prompt(0, LENGTH))
    stored = keys_of(replica, "r0")
    replica.forget()
    replica.ranks[failing].copier.gate.fail(CopyKind.LOAD, positions)
    req_id = replica.ask(prompt(0, LENGTH), 2)
    for _ in range(30):
        replica.step()
        check_step(replica)
    assert not replica.busy
    asked = replica.asked[req_id]
    assert asked.finished == "length"
    assert replica.counters.failed_copies == 1
    assert asked.cached == BLOCK * (0 if positions is None else positions[0])
    # What had to be computed again was stored again.
    assert keys_of(replica, req_id) == stored
    replica.forget()
    assert replica.answer(prompt(0, LENGTH), 2).cached == 5 * BLOCK
    assert replica.counters.failed_copies == 1


@either_rank
def test_a_failed_window_block_starts_the_request_over(
    make_replica: MakeReplica, failing: int
) -> None:
    """Its full-attention blocks are good, but no prefix has a whole window any more."""
    replica = make_replica(HYBRID)
    replica.answer(prompt(0, 3 * BLOCK + 1))
    replica.forget()
    replica.ranks[failing].copier.gate.fail(CopyKind.LOAD, [3])  # 0 to 2 are full attention's
    assert replica.answer(prompt(0, 3 * BLOCK + 1), 2).cached == 0
    assert replica.manager.receipts.totals.hits_gpu_blocks == 0
    replica.forget()
    assert replica.answer(prompt(0, 3 * BLOCK + 1), 2).cached == 3 * BLOCK


def test_a_failed_key_stays_a_miss_for_its_request(make_replica: MakeReplica) -> None:
    """Also when somebody else has stored it again meanwhile: no request may try for ever."""
    replica = make_replica(TP2)
    replica.answer(prompt(0, 2 * BLOCK))
    manager, key = replica.manager, keys_of(replica, "r0").pop()
    burnt, other = ReqContext(req_id="burnt"), ReqContext(req_id="other")
    manager.on_new_request(burnt)
    manager.on_new_request(other)
    manager.state_of("burnt").failed_keys.add(key)
    assert manager.lookup(key, burnt) is LookupResult.MISS
    assert manager.lookup(key, other) is LookupResult.HIT
    manager.on_request_finished(burnt)
    manager.on_request_finished(other)


@either_rank
@pytest.mark.parametrize("shape", [SHAPES["tp2"], OVERLAPPED], ids=["tp2", "overlapped"])
def test_a_failure_is_remembered_until_the_last_rank_answers(
    make_replica: MakeReplica, shape: Shape, failing: int
) -> None:
    """The failing rank answers at once, the other ten steps later, and the other way round."""
    for late in (0, 1):
        replica = make_replica(shape)
        replica.answer(prompt(0, LENGTH))
        replica.forget()
        replica.ranks[failing].copier.gate.fail(CopyKind.LOAD, [2])
        replica.ranks[late].copier.gate.report = 0
        req_id = replica.ask(prompt(0, LENGTH), 2)
        for _ in range(10):
            replica.step()
            check_step(replica)
        assert replica.asked[req_id].cached is None
        assert replica.counters.failed_copies == 0
        replica.run()
        assert replica.asked[req_id].cached == 2 * BLOCK
        assert replica.counters.failed_copies == 1


@every_shape
def test_a_load_that_fails_at_both_ranks_counts_once(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    replica.answer(prompt(0, LENGTH))
    replica.forget()
    replica.ranks[0].copier.gate.fail(CopyKind.LOAD, [3])
    replica.ranks[1].copier.gate.fail(CopyKind.LOAD, [1])
    asked = replica.answer(prompt(0, LENGTH), 2)
    assert asked.cached == BLOCK
    assert replica.counters.failed_copies == 1


@every_shape
def test_every_load_fails(make_replica: MakeReplica, shape: Shape) -> None:
    """Whatever is tried again ends: each failed key is a miss for its request."""
    replica = make_replica(shape)
    replica.answer(prompt(0, LENGTH))
    for _ in range(3):
        replica.forget()
        for _ in range(20):
            replica.ranks[1].copier.gate.fail(CopyKind.LOAD)
        asked = replica.answer(prompt(0, LENGTH), 2)
        assert asked.cached == 0
        replica.ranks[1].copier.gate.failures[CopyKind.LOAD].clear()
    assert replica.counters.failed_copies >= 3


@every_shape
def test_two_requests_wait_for_one_load_that_fails(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(shape)
    replica.answer(prompt(0, LENGTH))
    replica.forget()
    replica.ranks[1].copier.gate.fail(CopyKind.LOAD, [2])
    first = replica.ask(prompt(0, LENGTH), 2)
    second = replica.ask(prompt(0, LENGTH + 4), 2)
    replica.run()
    assert replica.asked[first].finished == replica.asked[second].finished == "length"
    assert replica.counters.failed_copies == 1


@every_shape
def test_aborted_while_its_load_fails(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(shape)
    replica.answer(prompt(0, LENGTH))
    replica.forget()
    for rank in replica.ranks:
        rank.copier.gate.report = 0
    replica.ranks[1].copier.gate.fail(CopyKind.LOAD)
    req_id = replica.ask(prompt(0, LENGTH), 2)
    for _ in range(3):
        replica.step()
    replica.abort(req_id)
    replica.run()
    assert replica.counters.failed_copies == 1
    # A sliding window's load reads its last blocks only.
    assert not [key for key in keys_of(replica, req_id) if group_of(key) == 0]
