"""What must hold in a replica of the harness: at every step, and once it has come to rest."""

from __future__ import annotations

import numpy as np
from harness import Rank, Replica
from shapes import BLOCK

from xinference_xavier.policy.planner import group_of
from xinference_xavier.policy.tier import RowState
from xinference_xavier.types import row_of

READABLE = (RowState.READY, RowState.LEAVING)


def check_step(replica: Replica) -> None:
    """Index and rows agree, and every snapshot holds its bytes on every rank."""
    index = replica.manager.index
    index.validate()
    origin = block_origins(replica)
    for key in tuple(index.keys()):
        location = index.where(key)
        if index.rows_at(location).state[row_of(location)] in READABLE:
            req_id, number = origin[key[:-4]]
            for rank in replica.ranks:
                check_row(rank, replica, req_id, number, group_of(key), location)


def block_origins(replica: Replica) -> dict[bytes, tuple[str, int]]:
    """Each block hash, with a request that has it and the block's number there."""
    return {
        bytes(block_hash): (request.request_id, number)
        for request in replica.requests
        for number, block_hash in enumerate(request.block_hashes)
    }


def check_row(
    rank: Rank, replica: Replica, req_id: str, number: int, group: int, location: int
) -> None:
    """The row at ``location`` holds block ``number`` of the request, in every layer."""
    copier = rank.copier.inner
    memories, rows = copier._rows.resolve(np.array([location]))
    row = copier._memories[int(memories[0])][int(rows[0])]
    for page in copier._layout.groups[group]:
        address = copier._layout.tensors[page.tensor].data_ptr()
        layer = next(
            layer
            for layer in rank.model.layers
            if layer.group == group and layer.slots.ctypes.data == address
        )
        text = replica.texts[req_id]
        expected = text.content(number * BLOCK, (number + 1) * BLOCK, layer.salt).tobytes()
        assert row[page.offset : page.offset + page.nbytes].tobytes() == expected, (
            f"rank {rank.number}: row {location} does not hold block {number} of {req_id} "
            f"in layer {layer.name}"
        )


def check_answers(replica: Replica) -> None:
    """Every request ended, and answered what the model says."""
    for req_id, asked in replica.asked.items():
        assert asked.finished is not None, f"{req_id} never ended"
        start = len(asked.prompt)
        right = [asked.text.token(start + i) for i in range(len(asked.answer))]
        assert asked.answer == right, f"{req_id} answered {asked.answer} instead of {right}"
        if asked.finished == "length":
            assert len(asked.answer) == asked.max_tokens


def check_receipts(replica: Replica) -> None:
    """Receipts add up, say what vLLM really did, and totals are their sums."""
    receipts = replica.manager.receipts
    for receipt in receipts.recent:
        parts = (receipt.engine, receipt.gpu, receipt.cpu, receipt.computed)
        assert sum(parts) == receipt.prompt, receipt
        assert min(parts) >= 0, receipt
        cached = replica.asked[receipt.request_id].cached
        if cached is not None:
            assert receipt.computed == max(1, receipt.prompt - cached), (receipt, cached)
    totals = receipts.totals
    sources = (totals.tokens_engine, totals.tokens_gpu, totals.tokens_cpu, totals.tokens_computed)
    assert sum(sources) == totals.tokens_prompt
    assert totals.requests == sum(asked.cached is not None for asked in replica.asked.values())


def check_rest(replica: Replica) -> None:
    """Nothing is left of requests and jobs: no pin, no record, no block."""
    assert not replica.busy
    manager = replica.manager
    assert len(manager.ledger) == 0
    assert not manager.requests
    for tier in (manager.index.gpu, manager.index.cpu):
        assert not any(tier.pins)
        assert tier.free + tier.snapshots == tier.rows
    theirs = replica.connector.connector_scheduler
    assert not theirs._jobs
    assert not theirs._req_status
    assert not theirs._block_id_to_pending_jobs
    pool = replica.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == replica.shape.blocks - 1
    for rank in replica.ranks:
        assert not rank.copier.busy
        assert not rank.connector._worker._load_blocks
        assert not rank.connector._worker._load_requests
        assert rank.copier.mismatches == 0
    assert manager.mismatches == 0
    check_step(replica)
    check_answers(replica)
    check_receipts(replica)
