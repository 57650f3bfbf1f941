"""What must hold in a replica of the harness: at every step, and once it has come to rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from harness import Rank, Replica
from shapes import BLOCK

from xinference_xavier.engine.receipts import SOURCES
from xinference_xavier.policy.columns import RowState
from xinference_xavier.policy.planner import group_of
from xinference_xavier.types import NOWHERE, row_of

READABLE = (RowState.READY, RowState.LEAVING)
Pages = list[tuple[int, bytes]]


@dataclass
class Expected:
    """What the rows of a replica must hold; made once per key, since checks run at every step."""

    #: Each block hash, with a request that has it and the block's number there.
    origins: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    #: By rank and key: offset and content of each page.
    pages: dict[tuple[int, bytes], Pages] = field(default_factory=dict)

    def update(self, replica: Replica) -> None:
        for request in replica.requests:
            start = self.known.get(request.request_id, 0)
            for number, block_hash in enumerate(request.block_hashes[start:], start):
                self.origins[bytes(block_hash)] = request.request_id, number
            self.known[request.request_id] = len(request.block_hashes)

    def of(self, rank: Rank, key: bytes) -> Pages:
        pages = self.pages.get((rank.number, key))
        if pages is None:
            req_id, number = self.origins[key[:-4]]
            pages = self.pages[rank.number, key] = self._make(rank, req_id, number, group_of(key))
        return pages

    def _make(self, rank: Rank, req_id: str, number: int, group: int) -> Pages:
        layout = rank.copier.inner._layout
        pages = []
        for page in layout.groups[group]:
            address = layout.tensors[page.tensor].data_ptr()
            layers = (layer for layer in rank.model.layers if layer.group == group)
            layer = next(layer for layer in layers if layer.slots.ctypes.data == address)
            text = rank.model.texts[req_id]
            content = text.content(number * BLOCK, (number + 1) * BLOCK, layer.salt).tobytes()
            assert len(content) == page.nbytes
            pages.append((page.offset, content))
        return pages


_expected: WeakKeyDictionary[Replica, Expected] = WeakKeyDictionary()


def check_step(replica: Replica) -> None:
    """Index and rows agree, and every snapshot holds its bytes on every rank."""
    index = replica.manager.index
    index.validate()
    expected = _expected.setdefault(replica, Expected())
    expected.update(replica)
    snapshots = [
        (key, location)
        for key in index.keys()  # noqa: SIM118
        if (location := index.where(key)) != NOWHERE
        and index.rows_at(location).state[row_of(location)] in READABLE
    ]
    if snapshots:
        for rank in replica.ranks:
            _check_rows(rank, snapshots, expected)


def _check_rows(rank: Rank, snapshots: list[tuple[bytes, int]], expected: Expected) -> None:
    copier = rank.copier.inner
    memories, rows = copier._rows.resolve(np.array([location for _, location in snapshots]))
    for (key, location), memory, row in zip(snapshots, memories, rows, strict=True):
        held = copier._memories[memory][row]
        for offset, content in expected.of(rank, key):
            assert held[offset : offset + len(content)].tobytes() == content, (
                f"rank {rank.number}: the row at {location} holds other bytes than were stored"
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
        parts = [getattr(receipt, source) for source in SOURCES]
        assert sum(parts) == receipt.prompt, receipt
        assert min(parts) >= 0, receipt
        cached = replica.asked[receipt.request_id].cached
        if cached is not None:
            assert receipt.computed == max(1, receipt.prompt - cached), (receipt, cached)
    totals = receipts.totals
    assert sum(getattr(totals, f"tokens_{name}") for name in SOURCES) == totals.tokens_prompt
    assert totals.requests == sum(asked.cached is not None for asked in replica.asked.values())


def check_told(replica: Replica) -> None:
    """What outputs said of a request is its receipt, with its first output and with its last."""
    receipts = replica.manager.receipts
    assert not receipts.untold
    for receipt in receipts.recent:
        asked = replica.asked[receipt.request_id]
        if receipts.untold is None or not asked.outputs:
            assert not asked.told
            continue
        expected = {0} if asked.finished == "abort" else {0, asked.outputs - 1}
        assert set(asked.told) == expected, receipt
        for told in asked.told.values():
            assert told == {source: getattr(receipt, source) for source in SOURCES}


def check_rest(replica: Replica) -> None:
    """Nothing is left of requests and jobs: no pin, no record, no block."""
    assert not replica.busy
    manager = replica.manager
    assert len(manager.ledger) == 0
    assert not manager.requests
    assert manager.planner.fetches.flying == 0
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
    check_told(replica)
