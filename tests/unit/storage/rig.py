"""A layout with random content, two slabs and a copier under test, on the CPU or a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from simulated_runtime import SimulatedRuntime

from xinference_xavier.storage.copier import Copier, CopyJob, CopyKind, CopyResult, create_copier
from xinference_xavier.storage.cuda_copier import CudaCopier
from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.jobs import NO_INDEXES
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.self_check import SelfCheck
from xinference_xavier.storage.slab import Slab

NUM_BLOCKS = 24
ROWS = 16


def random_bytes(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8).to(device)


def uniform(device: str) -> RowLayout:
    tensors = [random_bytes(NUM_BLOCKS, 64, device=device) for _ in range(3)]
    return RowLayout.from_refs(tensors, [[(index, 64) for index in range(3)]])


def mixed_dtypes(device: str) -> RowLayout:
    """bf16 keys, fp32 states and byte-sized indexes, seen as int8 as vLLM hands them over."""
    keys = torch.randn(NUM_BLOCKS, 24, dtype=torch.bfloat16).view(torch.int8)
    states = torch.randn(NUM_BLOCKS, 10, dtype=torch.float32).view(torch.int8)
    tensors = [t.to(device) for t in (keys, states, random_bytes(NUM_BLOCKS, 13))]
    return RowLayout.from_refs(tensors, [[(0, 48), (1, 40), (2, 13)]])


def hybrid(device: str) -> RowLayout:
    """Three KV groups over two tensors, with unpadded pages of different sizes."""
    tensors = [random_bytes(NUM_BLOCKS, 64, device=device) for _ in range(2)]
    return RowLayout.from_refs(tensors, [[(0, 64), (1, 64)], [(1, 40), (1, 24)], [(0, 32)]])


def packed(device: str) -> RowLayout:
    """Pages of one block beside each other in one storage: stride(0) exceeds the page."""
    storage = random_bytes(NUM_BLOCKS, 120, device=device)
    return RowLayout.from_refs([storage[:, :48], storage[:, 56:120]], [[(0, 48), (1, 64)]])


def cross_layer(device: str) -> RowLayout:
    return RowLayout.from_refs([random_bytes(NUM_BLOCKS, 192, device=device)], [[(0, 192)]])


LAYOUTS: dict[str, Callable[[str], RowLayout]] = {
    f.__name__: f for f in (uniform, mixed_dtypes, hybrid, packed, cross_layer)
}


class Rig:
    """One copier with its memory, and the expectations of a test in plain torch."""

    def __init__(
        self,
        kind: str,
        layout: str = "uniform",
        *,
        tiers: str = "both",
        self_check: float = 0.0,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        device = "cuda" if kind == "cuda" else "cpu"
        self.layout = LAYOUTS[layout](device)
        rows = self.layout.row_bytes
        self.device_slab = Slab(ROWS, rows, device) if tiers != "host" else None
        pinned = kind == "cuda"
        self.host_slab = Slab(ROWS, rows, "cpu", pinned=pinned) if tiers != "device" else None
        for slab in (self.device_slab, self.host_slab):
            if slab is not None:
                slab.view(0, ROWS).view(torch.int8).copy_(random_bytes(ROWS, rows))
        self.runtime: SimulatedRuntime | None = None
        self.copier = self._make(kind, self_check, faults, seed)
        self._next_id = 0

    def _make(self, kind: str, self_check: float, faults: Faults | None, seed: int) -> Copier:
        slabs = (self.device_slab, self.host_slab)
        if kind != "simulated":
            return create_copier(self.layout, *slabs, self_check=self_check, faults=faults)
        self.runtime = SimulatedRuntime(self.layout, seed)
        check = SelfCheck(self.layout, self_check) if self_check else None
        return CudaCopier(self.layout, *slabs, check=check, faults=faults, runtime=self.runtime)

    def close(self) -> None:
        self.copier.close()
        self.copier.close()
        for slab in (self.device_slab, self.host_slab):
            if slab is not None:
                slab.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("xavier-")]

    def job(
        self,
        kind: CopyKind,
        blocks: Sequence[int] = (),
        sources: Sequence[int] = (),
        targets: Sequence[int] = (),
        groups: tuple[int, ...] | None = None,
    ) -> CopyJob:
        self._next_id += 1
        arrays = [
            np.array(x, np.int64) if len(x) else NO_INDEXES for x in (blocks, sources, targets)
        ]
        sizes = (len(blocks),) if groups is None else groups
        return CopyJob(self._next_id, kind, arrays[0], sizes, arrays[1], arrays[2])

    def store(
        self, blocks: Sequence[int], targets: Sequence[int], groups: tuple[int, ...] | None = None
    ) -> CopyJob:
        return self.job(CopyKind.STORE, blocks, targets=targets, groups=groups)

    def load(
        self, blocks: Sequence[int], sources: Sequence[int], groups: tuple[int, ...] | None = None
    ) -> CopyJob:
        return self.job(CopyKind.LOAD, blocks, sources=sources, groups=groups)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> CopyJob:
        return self.job(CopyKind.MOVE, sources=sources, targets=targets)

    def run(self, *jobs: CopyJob) -> list[CopyResult]:
        """Submit jobs and collect their results, in the order of the jobs."""
        for job in jobs:
            self.copier.submit(job)
        results = self.collect(len(jobs))
        return [results[job.job_id] for job in jobs]

    def collect(self, count: int) -> dict[int, CopyResult]:
        results: dict[int, CopyResult] = {}
        for _ in range(100_000):
            results.update((result.job_id, result) for result in self.copier.poll())
            if len(results) == count:
                assert self.copier.poll() == []
                return results
            if self.runtime is None and self.layout.device.type == "cpu":
                self.copier.wait(range(self._next_id + 1))
            elif self.runtime is None:
                torch.cuda.synchronize()
        raise AssertionError(f"{count - len(results)} jobs did not end")

    def compute(self, work: Callable[[], None]) -> None:
        """What the model does: on the compute stream where there is one, else at once."""
        if self.runtime is not None:
            self.runtime.enqueue(self.runtime.current(), work)
        else:
            work()

    def row(self, location: int) -> torch.Tensor:
        """A row, int8 ``[row_bytes]``, sharing memory."""
        slab = self.device_slab if location >= 0 else self.host_slab
        assert slab is not None
        return slab.view(location if location >= 0 else ~location, 1)[0].view(torch.int8)

    def row_pages(self, location: int, group: int = 0) -> bytes:
        row = self.row(location).cpu()
        pages = self.layout.groups[group]
        return b"".join(row[p.offset : p.offset + p.nbytes].numpy().tobytes() for p in pages)

    def block_pages(self, block: int, group: int = 0) -> bytes:
        pages, tensors = self.layout.groups[group], self.layout.tensors
        return b"".join(tensors[p.tensor][block, : p.nbytes].cpu().numpy().tobytes() for p in pages)

    def caches(self) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for tensor in self.layout.tensors]

    def rows(self) -> dict[int, bytes]:
        """The content of every row, by location."""
        device = range(ROWS) if self.device_slab is not None else ()
        host = [~row for row in range(ROWS)] if self.host_slab is not None else ()
        return {at: self.row(at).cpu().numpy().tobytes() for at in (*device, *host)}
