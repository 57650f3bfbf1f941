"""The copier alone: KV caches with random content, two full tiers, and jobs between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from xinference_xavier.storage.copier import Copier, CopyJob, CopyKind, create_copier
from xinference_xavier.storage.jobs import NO_INDEXES
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.slab import Slab

#: KV cache tensors and bytes of a page of 16 tokens in each.
SHAPES = {
    "small": (24, 512),  # 12 KiB a block
    "mla": (61, 16 * 576 * 2),  # 1.1 MiB: one latent tensor a layer, bf16
    "8b": (32, 16 * 2 * 8 * 128 * 2),  # 2 MiB: 8 KV heads of 128, bf16
    "70b": (80, 16 * 2 * 8 * 128 * 2),  # 5 MiB
    "cross_layer": (1, 32 * 16 * 2 * 8 * 128 * 2),  # 2 MiB in one tensor
}


@dataclass
class Bench:
    """KV caches with random content, both tiers full of rows, and the copier between them."""

    layout: RowLayout
    device_slab: Slab
    host_slab: Slab
    copier: Copier
    rows: int

    @classmethod
    def make(cls, shape: tuple[int, int], rows: int, device: str) -> Bench:
        count, page_bytes = shape
        tensors = [
            torch.randint(-128, 128, (rows, page_bytes), dtype=torch.int8, device=device)
            for _ in range(count)
        ]
        layout = RowLayout.from_refs(tensors, [[(index, page_bytes) for index in range(count)]])
        device_slab = Slab(rows, layout.row_bytes, device)
        host_slab = Slab(rows, layout.row_bytes, "cpu", pinned=device != "cpu")
        copier = create_copier(layout, device_slab, host_slab)
        return cls(layout, device_slab, host_slab, copier, rows)

    @property
    def nbytes(self) -> int:
        return self.rows * self.layout.row_bytes

    def close(self) -> None:
        self.copier.close()
        self.device_slab.close()
        self.host_slab.close()

    def job(self, number: int, kind: str, order: np.ndarray) -> CopyJob:
        """Blocks and rows in ``order``; locations of the host tier are inverted."""
        device, host, blocks = order, ~order, order
        sides = {
            "store": (CopyKind.STORE, blocks, NO_INDEXES, device),
            "load": (CopyKind.LOAD, blocks, device, NO_INDEXES),
            "demote": (CopyKind.MOVE, NO_INDEXES, device, host),
            "promote": (CopyKind.MOVE, NO_INDEXES, host, device),
            "store_to_host": (CopyKind.STORE, blocks, NO_INDEXES, host),
            "load_from_host": (CopyKind.LOAD, blocks, host, NO_INDEXES),
        }
        job_kind, used, sources, targets = sides[kind]
        return CopyJob(number, job_kind, used, (len(used),), sources, targets)

    def run(self, kind: str, order: np.ndarray) -> float:
        """Bytes per second of one job."""
        self.copier.submit(self.job(1, kind, order))
        while not (results := self.copier.poll()):
            pass
        (result,) = results
        if not result.ok or result.nbytes != self.nbytes:
            raise RuntimeError(f"{kind} failed: {result}")
        return result.nbytes / result.seconds
