"""What scheduler and workers tell each other: picklable data only.

Built on vLLM's own offloading messages, so that its connector handles its part unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from xinference_xavier.actors.tier import TierAddress
from xinference_xavier.policy.plans import LoadPlan, MovePlan, StorePlan
from xinference_xavier.types import Tier

if TYPE_CHECKING:
    from xinference_xavier.storage.transport import RankMemory


class RowsSpec(LoadStoreSpec):
    """Our side of a transfer: locations, one per block, in the job's block order.

    Carries its plan within the scheduler process; only the locations travel to the workers.
    """

    def __init__(self, locations: np.ndarray, plan: StorePlan | LoadPlan | None = None) -> None:
        self.locations = locations  # int64 [blocks]
        self.plan = plan

    @classmethod
    def of(cls, plan: StorePlan | LoadPlan) -> RowsSpec:
        return cls(np.array(plan.locations, dtype=np.int64), plan)

    def __reduce__(self) -> tuple:
        return RowsSpec, (self.locations,)


class MoveJob(NamedTuple):
    """Rows to be copied between the tiers: ``sources[i]`` to ``targets[i]``, int64 locations."""

    job_id: int
    sources: np.ndarray
    targets: np.ndarray

    @classmethod
    def of(cls, job_id: int, plan: MovePlan) -> MoveJob:
        """Sorted by source, so that the copier sees neighbours as one run."""
        sources = np.array(plan.sources, dtype=np.int64)
        targets = np.array(plan.targets, dtype=np.int64)
        order = np.argsort(sources)
        return cls(job_id, sources[order], targets[order])


class ResizeOrder(NamedTuple):
    """Back ``rows`` rows of a tier with memory, and no others; on every rank."""

    order_id: int
    tier: Tier
    rows: int


@dataclass
class XavierConnectorMetadata(OffloadingConnectorMetadata):
    """Scheduler to workers, once a step."""

    moves: list[MoveJob] = field(default_factory=list)
    #: Loads that must wait for rows still being read from a peer: job id to fetches.
    waits: dict[int, frozenset[int]] = field(default_factory=dict)
    #: Fetches that have ended without every rank being told, and what of them did not arrive.
    ended: dict[int, frozenset[int] | None] = field(default_factory=dict)
    resizes: list[ResizeOrder] = field(default_factory=list)


class Copied(NamedTuple):
    """Work done by copies of one kind."""

    jobs: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def plus(self, other: Copied) -> Copied:
        return Copied(
            self.jobs + other.jobs, self.nbytes + other.nbytes, self.seconds + other.seconds
        )


@dataclass
class XavierWorkerMetadata(OffloadingWorkerMetadata):
    """Workers to scheduler, whenever a job of ours ended.

    ``completed_jobs`` of the base counts stores and loads over ranks; vLLM believes all of them
    succeeded. The truth is here.
    """

    #: Moves that ended, by job id: how many ranks.
    completed_moves: dict[int, int] = field(default_factory=dict)
    #: Jobs that failed on some rank: positions of the blocks (loads) or empty (stores, moves).
    failed: dict[int, frozenset[int]] = field(default_factory=dict)
    #: By kind of copy: "store", "load", "move".
    copied: dict[str, Copied] = field(default_factory=dict)
    #: Loads whose bytes differed from the checksum taken at the store.
    mismatches: int = 0
    #: Resize orders that ended: how many ranks; and the first rank's reason for each that failed.
    resized: dict[int, int] = field(default_factory=dict)
    resize_problems: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> XavierWorkerMetadata:
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata)
        assert isinstance(other, XavierWorkerMetadata)
        moves = dict(self.completed_moves)
        for job_id, ranks in other.completed_moves.items():
            moves[job_id] = moves.get(job_id, 0) + ranks
        failed = dict(self.failed)
        for failed_id, positions in other.failed.items():
            failed[failed_id] = failed.get(failed_id, frozenset()) | positions
        copied = dict(self.copied)
        for kind, work in other.copied.items():
            copied[kind] = copied.get(kind, Copied()).plus(work)
        resized = dict(self.resized)
        for order_id, ranks in other.resized.items():
            resized[order_id] = resized.get(order_id, 0) + ranks
        return XavierWorkerMetadata(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            completed_moves=moves,
            failed=failed,
            copied=copied,
            mismatches=self.mismatches + other.mismatches,
            resized=resized,
            resize_problems={**other.resize_problems, **self.resize_problems},
        )

    def is_empty(self) -> bool:
        ended = self.completed_jobs or self.completed_moves or self.failed or self.resized
        return not (ended or self.mismatches)


@dataclass
class RankCapacity(KVConnectorHandshakeMetadata):
    """What one rank made room for; the scheduler uses the least of each over all ranks."""

    gpu_rows: int
    cpu_rows: int
    row_bytes: int
    #: Bytes of the rank's own KV pool, and its blocks.
    pool_bytes: int
    pool_blocks: int
    #: Where the rank's actor listens, and what peers need to read its slabs; None: not shared.
    tier: TierAddress | None = None
    memory: RankMemory | None = None
    #: The sentence why there is neither.
    share_problem: str | None = None
    #: Rows that the tiers may have without a new launch; 0 for a tier that was switched off.
    most_gpu_rows: int = 0
    most_cpu_rows: int = 0
    #: Whether each tier's memory is given back when its rows go, and taken when they come.
    elastic: tuple[bool, bool] = (False, False)
