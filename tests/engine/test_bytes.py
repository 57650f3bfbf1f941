"""Every byte loaded is the byte stored: whatever the length, the tier and the way there.

The harness compares every slot that attention would read, the checks every row of every rank.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from checks import check_step
from harness import MakeReplica, Replica
from shapes import BLOCK, HYBRID, PP2, TP2, Shape
from vllm.v1.kv_offload.base import make_offload_key

OVERLAPPED = replace(TP2, overlapped=True)
SHAPES = {"tp2": TP2, "pp2": PP2, "hybrid": HYBRID, "overlapped": OVERLAPPED}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
around_a_block = pytest.mark.parametrize("extra", [-1, 0, 1])


def prompt(number: int, length: int) -> list[int]:
    """Prompts of different numbers share no prefix."""
    return [1 + (number * 37 + i * (number + 3)) % 250 for i in range(length)]


def follow_up(replica: Replica, number: int, length: int, outputs: int) -> int:
    """Ask, forget, and ask for a continuation; returns how much of that was cached."""
    first = replica.answer(prompt(number, length), outputs)
    check_step(replica)
    replica.forget()
    second = replica.answer([*first.prompt, *first.answer, 7, 7, 7], 2)
    check_step(replica)
    assert second.cached is not None
    return second.cached


@every_shape
@around_a_block
def test_prompts_that_end_around_a_block(
    make_replica: MakeReplica, shape: Shape, extra: int
) -> None:
    replica = make_replica(shape)
    length = 5 * BLOCK + extra
    cached = follow_up(replica, 1, length, 1)  # one token is sampled and never written
    assert cached == length // BLOCK * BLOCK


@every_shape
@around_a_block
def test_outputs_that_end_around_a_block(
    make_replica: MakeReplica, shape: Shape, extra: int
) -> None:
    replica = make_replica(shape)
    length, total = 4 * BLOCK + 1, 7 * BLOCK + extra
    cached = follow_up(replica, 2, length, total - length)
    assert cached == (total - 1) // BLOCK * BLOCK


@every_shape
def test_the_block_of_the_last_sampled_token_is_not_stored(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    replica.answer(prompt(3, 3 * BLOCK), BLOCK)
    hashes = replica.requests[0].block_hashes
    assert len(hashes) == 4
    stored = [make_offload_key(bytes(h), 0) in replica.manager.index for h in hashes]
    assert stored == [True, True, True, False]


@every_shape
def test_from_the_gpu_tier(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(shape)
    assert follow_up(replica, 4, 5 * BLOCK, 1) == 5 * BLOCK
    assert replica.manager.receipts.totals.tokens_gpu == 5 * BLOCK
    assert replica.manager.receipts.totals.tokens_cpu == 0


@every_shape
def test_from_the_cpu_tier_without_a_gpu_tier(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(replace(shape, gpu_rows=0))
    assert follow_up(replica, 5, 5 * BLOCK + 2, 3) == 6 * BLOCK
    assert replica.manager.receipts.totals.tokens_cpu == 6 * BLOCK
    assert replica.counters.stored_gpu == 0


@every_shape
def test_from_the_gpu_tier_without_a_cpu_tier(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(replace(shape, cpu_rows=0))
    for number in range(5):  # more than the tier holds: evicted, not demoted
        replica.answer(prompt(number, 5 * BLOCK))
        check_step(replica)
    assert replica.counters.evictions_gpu > 0
    assert follow_up(replica, 5, 5 * BLOCK, 1) == 5 * BLOCK
    assert replica.counters.demotions == replica.counters.promotions == 0


@every_shape
def test_after_demotion_and_after_promotion(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(shape)
    for number in range(6):
        replica.answer(prompt(number, 5 * BLOCK + 1))
        check_step(replica)
    assert replica.counters.demotions > 0
    totals = replica.manager.receipts.totals
    replica.forget()
    assert replica.answer(prompt(0, 5 * BLOCK + 1)).cached == 5 * BLOCK
    assert totals.tokens_cpu == 5 * BLOCK
    assert replica.counters.promotions > 0
    check_step(replica)
    replica.forget()
    assert replica.answer(prompt(0, 5 * BLOCK + 1)).cached == 5 * BLOCK
    assert totals.tokens_gpu > 0


@every_shape
def test_with_chunked_prefill(make_replica: MakeReplica, shape: Shape) -> None:
    """Chunks that end inside a block, and others that run beside them."""
    replica = make_replica(replace(shape, batch_tokens=13, blocks=61))
    asked = [replica.ask(prompt(number, 50 + number), 5) for number in range(3)]
    replica.run()
    check_step(replica)
    replica.forget()
    for number, req_id in enumerate(asked):
        cached = replica.answer(prompt(number, 50 + number), 2).cached
        whole_blocks = (50 + number) // BLOCK * BLOCK
        assert cached == min(whole_blocks, 50 + number - 1), req_id  # the last token is computed


@every_shape
def test_with_preemption(make_replica: MakeReplica, shape: Shape) -> None:
    """Three requests that fit one by one: preempted ones come back from the cache."""
    replica = make_replica(replace(shape, blocks=31 if shape is HYBRID else 21, max_model_len=48))
    for number in range(3):
        replica.ask(prompt(number, 5 * BLOCK), 6 * BLOCK)
    while replica.busy:
        replica.step()
        check_step(replica)
    assert sum(request.num_preemptions for request in replica.requests) > 0
    assert sum(rank.model.checked for rank in replica.ranks) > 0
