"""One rank's side of the cache: vLLM's transfer jobs become copy jobs.

Covers the translation of specs and results. Does not cover copying (``storage``). Runs on the
worker's main thread and never raises or waits, ``wait`` excepted: vLLM asserts that every job
succeeded, so failures travel beside its report, in ``XavierWorkerMetadata``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import numpy as np
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from xinference_xavier.engine.held import HeldLoads
from xinference_xavier.engine.messages import Copied, MoveJob, RankCapacity, ResizeOrder, RowsSpec
from xinference_xavier.engine.messages import XavierWorkerMetadata as WorkerMetadata
from xinference_xavier.engine.resizing import RankResizes
from xinference_xavier.engine.share import RankShare
from xinference_xavier.storage.copier import Copier, CopyJob, CopyKind, CopyResult
from xinference_xavier.storage.gates import Gates
from xinference_xavier.storage.slab import Slab

logger = logging.getLogger(__name__)

_NO_IDS = np.empty(0, dtype=np.int64)


class XavierWorker(OffloadingWorker):
    """Drives one rank's copier.

    Args:
        copier: moves the bytes.
        slabs: the rows' memory, of the GPU and of the CPU tier, given back at shutdown.
        capacity: what this rank tells the scheduler about its slabs.
        share: this rank among its peers, closed at shutdown.
    """

    def __init__(
        self,
        copier: Copier,
        slabs: tuple[Slab | None, Slab | None],
        capacity: RankCapacity,
        share: RankShare | None = None,
    ) -> None:
        self.copier = copier
        self._share = share
        self._held = HeldLoads(copier, share.gates if share is not None else Gates())
        self._slabs = slabs
        self._resizes = RankResizes(slabs)
        self.capacity = capacity
        #: Destination blocks of loads in flight, to name those that failed.
        self._load_blocks: dict[int, np.ndarray] = {}
        self._load_requests: dict[int, str] = {}
        self._waits: dict[int, frozenset[int]] = {}
        self._report = WorkerMetadata()
        self._bad_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._mismatches_told = 0
        self._failures = 0

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, RowsSpec)
        blocks = np.asarray(src_spec.block_ids, dtype=np.int64)
        sizes = tuple(src_spec.group_sizes)
        self.copier.submit(
            CopyJob(job_id, CopyKind.STORE, blocks, sizes, _NO_IDS, dst_spec.locations)
        )
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, RowsSpec)
        blocks = np.asarray(dst_spec.block_ids, dtype=np.int64)
        sizes = tuple(dst_spec.group_sizes)
        self._load_blocks[job_id] = blocks
        job = CopyJob(job_id, CopyKind.LOAD, blocks, sizes, src_spec.locations, _NO_IDS)
        self._held.submit(job, self._waits.pop(job_id, frozenset()))
        return True

    def expect_loads(
        self, requests: Mapping[int, str], waits: Mapping[int, frozenset[int]]
    ) -> None:
        """Which request each load of this step is for, and which fetches it waits for. Before
        the loads themselves."""
        self._load_requests.update(requests)
        self._waits.update(waits)

    def end_fetches(self, ended: Mapping[int, frozenset[int] | None]) -> None:
        """Fetches whose end this rank may not have been told by its actor."""
        self._held.end(ended)

    def submit_moves(self, moves: Collection[MoveJob]) -> None:
        """Copy rows between the tiers; after the step's loads, which somebody waits for."""
        for move in moves:
            self._held.submit_move(
                CopyJob(move.job_id, CopyKind.MOVE, _NO_IDS, (), move.sources, move.targets)
            )

    def resize(self, orders: Collection[ResizeOrder]) -> None:
        """Begin to back other numbers of rows with memory, in the background."""
        self._resizes.begin(orders)

    def get_finished(self) -> list[TransferResult]:
        """Stores and loads that ended, all as successes; moves go into the report only."""
        finished = []
        for result in self._held.poll():
            self._note(result)
            if result.kind is CopyKind.MOVE:
                self._report.completed_moves[result.job_id] = 1
                continue
            done = TransferResult(result.job_id, success=True)
            if result.ok:
                done.transfer_size, done.transfer_time = result.nbytes, result.seconds
            finished.append(done)
        return finished

    def _note(self, result: CopyResult) -> None:
        kind = result.kind.value
        work = Copied(1, result.nbytes, result.seconds)
        self._report.copied[kind] = self._report.copied.get(kind, Copied()).plus(work)
        blocks = self._load_blocks.pop(result.job_id, _NO_IDS)
        req_id = self._load_requests.pop(result.job_id, None)
        if result.ok:
            return
        self._report.failed[result.job_id] = frozenset(int(i) for i in result.failed)
        self._bad_blocks.update(int(block) for block in blocks[result.failed])
        if req_id is not None:
            self._failed_requests.add(req_id)
        self._failures += 1
        if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... of a burst
            logger.warning(
                "xavier: a %s failed and is treated as a miss (%d failed so far): %s",
                *(kind, self._failures, result.error),
            )

    def take_bad_blocks(self) -> set[int]:
        """KV blocks that a load left without valid bytes, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed_requests(self) -> set[str]:
        """Requests with a failed load since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> WorkerMetadata:
        """What ended since the last call."""
        report, self._report = self._report, WorkerMetadata()
        mismatches = self.copier.mismatches
        report.mismatches = mismatches - self._mismatches_told
        self._mismatches_told = mismatches
        report.resized, report.resize_problems = self._resizes.take_ended()
        return report

    def wait(self, job_ids: set[int]) -> None:
        """KV blocks of these jobs are about to be overwritten. On CUDA only the stream waits."""
        self.copier.wait(job_ids)

    def shutdown(self) -> None:
        if self._share is not None:
            self._share.close()
        self.copier.close()
        for slab in self._slabs:
            if slab is not None:
                slab.close()
