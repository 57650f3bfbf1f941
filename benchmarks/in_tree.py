"""Xinference's own ``TieredKVSnapshotStore`` on the inputs of ``own_store``, in the same process.

Used as its transfer actor uses it for complete blocks: layers gathered by block number, then
``stage_blocks`` and ``publish``. Its "GPU" tier is CPU memory here, as is ours.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from xinference.model.llm.xavier.backends.torch.tiered_snapshot import TieredKVSnapshotStore

from benchmarks.own_store import LAYERS, KVCache, store_us


class InTreeStore:
    """The in-tree store with both tiers full; the arguments of ``OwnStore``."""

    def __init__(self, history: int, cache: KVCache, batch: int, gpu_share: int = 5) -> None:
        self.cache = cache
        row_bytes = LAYERS * cache.layer_bytes
        gpu_rows = history // gpu_share if gpu_share else 0
        self.store = TieredKVSnapshotStore(
            history - gpu_rows, gpu_rows * row_bytes, row_bytes, torch.device("cpu")
        )
        self._names = [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]
        self._layers = set(self._names)
        self._numbers = itertools.count(1)
        self.stored: dict[int, int] = {}
        for _ in range(0, history + 2 * batch, batch):
            self._store(self._new_keys(batch), cache.some_blocks(batch))
        self.store.take_evicted()

    def _new_keys(self, count: int) -> list[int]:
        return list(itertools.islice(self._numbers, count))

    def batch_us(self, batch: int, single: bool = False) -> float:
        """As ``OwnStore.batch_us``."""
        keys, blocks = self._new_keys(batch), self.cache.some_blocks(batch)
        taken = store_us(self._store, keys, blocks, single)
        self.stored.update(zip(keys, blocks.tolist(), strict=True))
        self.store.take_evicted()
        return taken

    def _store(self, keys: list[int], blocks: np.ndarray) -> None:
        ids = torch.from_numpy(blocks)
        gathered = zip(self._names, self.cache.tensors, strict=True)
        self.store.stage_blocks(keys, {name: t.index_select(0, ids) for name, t in gathered})
        self.store.publish(keys, self._layers)

    def lease_oldest(self, leases: int, blocks: int) -> None:
        """As ``OwnStore.lease_oldest``: where leased blocks get to when what is behind them in the
        order has been evicted."""
        half, store = leases * blocks // 2, self.store
        in_cpu = (key for key in store.blocks if store.tiers[key] == "cpu")
        keys = [*itertools.islice(store._gpu_lru, half), *itertools.islice(in_cpu, half)]
        for at in range(leases):
            assert store.reserve(f"peer {at}", keys[at * blocks : (at + 1) * blocks])
        for key in reversed(keys):
            store.blocks.move_to_end(key, last=False)
            if key in store._gpu_lru:
                store._gpu_lru.move_to_end(key, last=False)

    def verify(self) -> int:
        """As ``OwnStore.verify``."""
        verified = 0
        for key, block in self.stored.items():
            if key not in self.store.blocks:
                continue
            for name, tensor in zip(self._names, self.cache.tensors, strict=True):
                assert torch.equal(self.store.blocks[key][name], tensor[block]), f"{key}, {name}"
            verified += 1
        return verified

    def close(self) -> None:
        """Give the memory back."""
        self.store.blocks.clear()
