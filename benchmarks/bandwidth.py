"""Rows of real sizes: gather and demotion in GB/s, against a memcpy of as many bytes.

A store reads each byte once and writes it once, as a memcpy does; so does a demotion. The memory is
several times the CPU's caches.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.own_store import LAYERS, KVCache, OwnStore
from benchmarks.timing import alternate, spread
from xinference_xavier.storage.copier import CopyJob, CopyKind
from xinference_xavier.storage.jobs import NO_INDEXES


class Sweep:
    """A store, a move and a memcpy of ``count`` rows of ``row_bytes``, in GB/s each."""

    def __init__(self, row_bytes: int, count: int) -> None:
        self.count = count
        self.cache = KVCache(2 * count, row_bytes // LAYERS)
        self.own = OwnStore(2 * count, self.cache, count, gpu_share=2)
        self.nbytes = count * self.cache.layer_bytes * LAYERS
        self._from = np.ones(self.nbytes, np.uint8)
        self._to = np.zeros(self.nbytes, np.uint8)
        self._rows = np.arange(count, dtype=np.int64)
        self._next_id = 1_000_000

    def memcpy(self) -> float:
        started = time.perf_counter()
        np.copyto(self._to, self._from)
        return self.nbytes / (time.perf_counter() - started) / 1e9

    def gather(self) -> float:
        """24 tensors' pages of scattered blocks into GPU rows."""
        blocks = self.cache.some_blocks(self.count)
        job = self._job(CopyKind.STORE, blocks, NO_INDEXES, self._rows)
        rate = self._run(job)
        for row in range(self.count):
            self._check(row, int(blocks[row]))
        return rate

    def demote(self) -> float:
        """GPU rows to CPU rows."""
        return self._run(self._job(CopyKind.MOVE, NO_INDEXES, self._rows, ~self._rows))

    def _check(self, row: int, block: int) -> None:
        assert self.own.gpu is not None
        there = self.own.gpu.view(row, 1)[0].numpy().view(np.int8)
        size = self.cache.layer_bytes
        for layer, tensor in enumerate(self.cache.tensors):
            part = there[layer * size : (layer + 1) * size]
            assert np.array_equal(part, tensor[block].numpy()), f"row {row}, layer {layer}"

    def _job(
        self, kind: CopyKind, blocks: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> CopyJob:
        self._next_id += 1
        sizes = (len(blocks),) if kind is CopyKind.STORE else ()
        return CopyJob(self._next_id, kind, blocks, sizes, sources, targets)

    def _run(self, job: CopyJob) -> float:
        copier, started = self.own.copier, time.perf_counter()
        copier.submit(job)
        copier.wait((job.job_id,))
        seconds = time.perf_counter() - started
        assert all(result.ok for result in copier.poll()), "a copy failed"
        return self.nbytes / seconds / 1e9


def sweep(row_bytes: int, total_bytes: int, quads: int) -> dict[str, float]:
    """Medians in GB/s, and the shares of the memcpy that ran beside each."""
    measured = Sweep(row_bytes, max(2, total_bytes // row_bytes))
    try:
        gather, copy_a = alternate(measured.gather, measured.memcpy, quads)
        demote, copy_b = alternate(measured.demote, measured.memcpy, quads)
    finally:
        measured.own.close()
    return {
        "row_bytes": row_bytes,
        "gather_gb_s": spread(gather)[1],
        "demote_gb_s": spread(demote)[1],
        "memcpy_gb_s": spread(copy_a + copy_b)[1],
        "gather_share": spread(gather)[1] / spread(copy_a)[1],
        "demote_share": spread(demote)[1] / spread(copy_b)[1],
    }
