"""One rank with real CPU slabs and the real copier, whose copies can be made to fail.

Every block has bytes of its own, derived from its key and the rank, so that a row that holds
another block, or half of one, is told from the right one.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque

import numpy as np
import torch
from policy_model import Job, group_of

from xinference_xavier.policy.plans import MovePlan, StorePlan
from xinference_xavier.storage.cpu_copier import CpuCopier
from xinference_xavier.storage.faults import Faults, InjectedFaultError
from xinference_xavier.storage.jobs import NO_INDEXES, CopyJob, CopyKind, CopyResult
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.slab import Slab
from xinference_xavier.types import row_of

NUM_BLOCKS = 32
#: Per KV group, tensor and page bytes of each layer; groups share tensors, as vLLM's hybrids do.
GROUPS = (((0, 32), (1, 24)), ((0, 32), (2, 8)), ((1, 16),))


class Sabotage(Faults):
    """Fails the next copy when told to."""

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.next_fails = False

    def strike(self, kind: str) -> None:
        fails, self.next_fails = self.next_fails, False
        if fails:
            raise InjectedFaultError(f"this {kind} fails")


def _slab(rows: int, row_bytes: int) -> Slab | None:
    return Slab(rows, row_bytes, "cpu", huge_pages=False) if rows else None


class Rank:
    """Runs the jobs it was given in order, one each time it is told to."""

    def __init__(self, number: int, gpu_rows: int, cpu_rows: int) -> None:
        self.number = number
        self.queue: deque[tuple[int, Job]] = deque()
        tensors = [torch.zeros(NUM_BLOCKS, size, dtype=torch.int8) for size in (32, 24, 8)]
        self.layout = RowLayout.from_refs(tensors, GROUPS)
        self.gpu = _slab(gpu_rows, self.layout.row_bytes)
        self.cpu = _slab(cpu_rows, self.layout.row_bytes)
        self.sabotage = Sabotage()
        self.copier = CpuCopier(self.layout, self.gpu, self.cpu, faults=self.sabotage)

    def close(self) -> None:
        self.copier.close()
        for slab in (self.gpu, self.cpu):
            if slab is not None:
                slab.close()

    # -- bytes -------------------------------------------------------------------------------

    def _pages(self, key: bytes) -> list[np.ndarray]:
        """The right bytes of each page of a block."""
        pages = self.layout.groups[group_of(key)]
        stream = hashlib.shake_256(key + bytes([self.number]))
        digest = np.frombuffer(stream.digest(sum(page.nbytes for page in pages)), np.uint8)
        return np.split(digest, np.cumsum([page.nbytes for page in pages])[:-1])

    def _block(self, key: bytes, block: int) -> list[np.ndarray]:
        """Views of the pages of a KV block."""
        pages = self.layout.groups[group_of(key)]
        tensors = self.layout.tensors
        return [tensors[p.tensor].numpy().view(np.uint8)[block, : p.nbytes] for p in pages]

    def _row(self, location: int) -> np.ndarray:
        slab = self.gpu if location >= 0 else self.cpu
        assert slab is not None
        return slab.view(row_of(location), 1)[0].numpy()

    def check_row(self, key: bytes, location: int) -> None:
        """The row holds exactly the bytes stored under its key."""
        row = self._row(location)
        for page, right in zip(self.layout.groups[group_of(key)], self._pages(key), strict=True):
            assert np.array_equal(row[page.offset : page.offset + page.nbytes], right)

    # -- jobs --------------------------------------------------------------------------------

    def run_next(self, fail: bool) -> tuple[Job, CopyResult]:
        """Run the oldest job of the queue to its end."""
        job_id, job = self.queue.popleft()
        copy = self._copy_job(job_id, job)
        for key, block in self._named_blocks(job, copy):
            for page, right in zip(self._block(key, block), self._pages(key), strict=True):
                page[:] = right if copy.kind is CopyKind.STORE else 0xEE
        self.sabotage.next_fails = fail
        self.copier.submit(copy)
        self.copier.wait([job_id])
        (result,) = self.copier.poll()
        assert not (fail and result.ok)
        if copy.kind is CopyKind.LOAD:
            self._check_loaded(job, copy, result)
        elif not result.ok:
            for location in copy.targets.tolist():
                self._row(location)[:] = 0xDD  # a failed copy may leave anything behind
        return job, result

    def _named_blocks(self, job: Job, copy: CopyJob) -> list[tuple[bytes, int]]:
        """Key and KV block of each position; none for a move, which touches no KV block."""
        if copy.kind is CopyKind.MOVE:
            return []
        return list(zip(job.plan.keys, copy.blocks.tolist(), strict=True))

    def _copy_job(self, job_id: int, job: Job) -> CopyJob:
        plan = job.plan
        if isinstance(plan, MovePlan):
            places = np.array(plan.sources, np.int64), np.array(plan.targets, np.int64)
            return CopyJob(job_id, CopyKind.MOVE, NO_INDEXES, (), *places)
        sizes = Counter(map(group_of, plan.keys))
        group_sizes = tuple(sizes[group] for group in range(len(GROUPS)))
        blocks = np.arange(len(plan.keys), dtype=np.int64)
        if job_id % 2:  # as vLLM hands out freed blocks
            blocks = blocks[::-1].copy()
        rows = np.array(plan.locations, np.int64)
        if isinstance(plan, StorePlan):
            return CopyJob(job_id, CopyKind.STORE, blocks, group_sizes, NO_INDEXES, rows)
        return CopyJob(job_id, CopyKind.LOAD, blocks, group_sizes, rows, NO_INDEXES)

    def _check_loaded(self, job: Job, copy: CopyJob, result: CopyResult) -> None:
        failed = set(result.failed.tolist())
        for position, (key, block) in enumerate(self._named_blocks(job, copy)):
            if position not in failed:
                for page, right in zip(self._block(key, block), self._pages(key), strict=True):
                    assert np.array_equal(page, right)
