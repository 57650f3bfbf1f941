"""This package's store as one replica runs it: planner, copier and two slabs on CPU tensors.

One batch is what the scheduler and the worker do for the blocks of one step: admission, the copy
out of 24 KV cache tensors, its commit, and the demotions that follow, copied and committed too.
Nothing overlaps here, as it does in an engine, so a batch's time is the sum of all its parts.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.leases import Leases
from xinference_xavier.policy.order import order_factory
from xinference_xavier.policy.planner import Planner, default_low_water
from xinference_xavier.policy.plans import MovePlan, StorePlan
from xinference_xavier.storage.copier import CopyJob, CopyKind, create_copier
from xinference_xavier.storage.jobs import NO_INDEXES
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.slab import Slab

LAYERS = 24
GROUP = (0).to_bytes(4, "big")


def random_keys(count: int) -> list[bytes]:
    """Keys as vLLM makes them: a hash of 32 bytes and the KV group."""
    return [os.urandom(32) + GROUP for _ in range(count)]


def store_us(
    store: Callable[[list[Any], np.ndarray], None],
    keys: list[Any],
    blocks: np.ndarray,
    single: bool,
) -> float:
    """Microseconds a block that ``store`` takes for blocks, together or one by one."""
    step = 1 if single else len(keys)
    started = time.perf_counter()
    for at in range(0, len(keys), step):
        store(keys[at : at + step], blocks[at : at + step])
    return (time.perf_counter() - started) / len(keys) * 1e6


class KVCache:
    """The engine's side: 24 tensors int8 ``[blocks, layer_bytes]`` with random content."""

    def __init__(self, blocks: int, layer_bytes: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.blocks, self.layer_bytes = blocks, layer_bytes
        self.tensors = [
            torch.randint(-128, 128, (blocks, layer_bytes), dtype=torch.int8) for _ in range(LAYERS)
        ]
        self._chance = np.random.default_rng(seed)

    def some_blocks(self, count: int) -> np.ndarray:
        """Distinct block numbers in no order: what an engine that has run for long hands out."""
        return self._chance.permutation(self.blocks)[:count].astype(np.int64)


class OwnStore:
    """A planner and a copier with both tiers full.

    Args:
        history: rows of both tiers together; every fifth is a GPU row.
        cache: whose blocks are stored.
        batch: blocks of one step, which set the low-water mark.
        gpu_share: one row in so many is a GPU row; 0 for none.
    """

    def __init__(
        self, history: int, cache: KVCache, batch: int, gpu_share: int = 5, policy: str = "lru"
    ) -> None:
        self.cache = cache
        gpu_rows = history // gpu_share if gpu_share else 0
        layout = RowLayout.from_refs(
            cache.tensors, [[(layer, cache.layer_bytes) for layer in range(LAYERS)]]
        )
        self.gpu = Slab(gpu_rows, layout.row_bytes, "cpu") if gpu_rows else None
        self.cpu = Slab(history - gpu_rows, layout.row_bytes, "cpu")
        for slab in filter(None, (self.gpu, self.cpu)):
            slab.touch()
            slab.wait_touched()
        self.copier = create_copier(layout, self.gpu, self.cpu)
        self.index = SnapshotIndex(gpu_rows, history - gpu_rows, order_factory(policy))
        self.planner = Planner(self.index, default_low_water(gpu_rows, batch), (), batch)
        self.leases = Leases(self.index)
        self._ids = itertools.count(1)
        self._mark = 0
        #: Which block each key was stored from, of timed stores.
        self.stored: dict[bytes, int] = {}
        for _ in range(0, history + 2 * batch, batch):
            self._plan_only(random_keys(batch))

    def _plan_only(self, keys: Sequence[bytes]) -> None:
        """Fill the index; the slabs' pages are there already, and nobody reads these rows."""
        self._mark += 1
        self.planner.commit_store(self.planner.admit(keys, self._mark, set()), ok=True)
        for plan in self.planner.plan_moves():
            self.planner.commit_move(plan, ok=True)

    def batch_us(self, batch: int, single: bool = False) -> float:
        """Store ``batch`` new blocks, together or one by one; microseconds a block."""
        keys, blocks = random_keys(batch), self.cache.some_blocks(batch)
        taken = store_us(self._store, keys, blocks, single)
        self.stored.update(zip(keys, blocks.tolist(), strict=True))
        return taken

    def _store(self, keys: list[bytes], blocks: np.ndarray) -> None:
        """One step: its moves are planned with its store, and both are committed when copied."""
        self._mark += 1
        plan = self.planner.admit(keys, self._mark, set())
        assert len(plan.keys) == len(keys), "blocks were skipped"
        moves = self.planner.plan_moves((self._mark,))
        jobs = [self._job(plan, blocks), *(self._job(move, NO_INDEXES) for move in moves)]
        for job in jobs:
            self.copier.submit(job)
        self.copier.wait([job.job_id for job in jobs])
        assert all(result.ok for result in self.copier.poll()), "a copy failed"
        self.planner.commit_store(plan, ok=True)
        for move in moves:
            self.planner.commit_move(move, ok=True)

    def _job(self, plan: StorePlan | MovePlan, blocks: np.ndarray) -> CopyJob:
        moves = isinstance(plan, MovePlan)
        return CopyJob(
            next(self._ids),
            CopyKind.MOVE if moves else CopyKind.STORE,
            blocks,
            () if moves else (len(blocks),),
            np.array(plan.sources, np.int64) if moves else NO_INDEXES,
            np.array(plan.targets if moves else plan.locations, np.int64),
        )

    def lease_oldest(self, leases: int, blocks: int) -> None:
        """Lease the ``leases * blocks`` snapshots at the front of the orders, half in each tier."""
        half = leases * blocks // 2
        keys = [
            tier.key[row]
            for tier in (self.index.gpu, self.index.cpu)
            for row in itertools.islice(tier.order, half)
        ]
        for at in range(leases):
            lease = self.leases.open(f"peer {at}", 0.0, 1e9)
            self.leases.extend(lease, keys[at * blocks : (at + 1) * blocks])
        assert self.leases.rows == len(keys), "leases were refused"

    def lease_us(self, blocks: int, repeats: int) -> float:
        """Lease and release ``blocks`` snapshots; microseconds a block for both."""
        keys = list(itertools.islice(self.index.keys(), blocks))
        started = time.perf_counter()
        for _ in range(repeats):
            lease = self.leases.open("reader", 0.0, 1e9)
            self.leases.extend(lease, keys)
            self.leases.release(lease)
        return (time.perf_counter() - started) / (repeats * len(keys)) * 1e6

    def lookup_us(self, count: int, hits: bool) -> float:
        """Microseconds of one lookup of a key that is here, or not."""
        keys = list(itertools.islice(self.index.keys(), count)) if hits else random_keys(count)
        lookup = self.index.lookup
        started = time.perf_counter()
        for key in keys:
            lookup(key)
        return (time.perf_counter() - started) / len(keys) * 1e6

    def verify(self) -> int:
        """Compare every row that a timed store wrote and that is still here with its block.

        Returns how many; raises ``AssertionError`` at the first difference.
        """
        self.index.validate()
        verified, size = 0, self.cache.layer_bytes
        for key, block in self.stored.items():
            location = self.index.where(key)
            if key not in self.index:
                continue
            slab, row = (self.gpu, location) if location >= 0 else (self.cpu, ~location)
            assert slab is not None
            bytes_there = slab.view(row, 1)[0].view(torch.int8)
            for layer, tensor in enumerate(self.cache.tensors):
                there = bytes_there[layer * size : (layer + 1) * size]
                assert torch.equal(there, tensor[block]), f"row {location}, layer {layer}"
            verified += 1
        return verified

    def close(self) -> None:
        """Stop the copier and give the memory back."""
        self.copier.close()
        for slab in filter(None, (self.gpu, self.cpu)):
            slab.close()
