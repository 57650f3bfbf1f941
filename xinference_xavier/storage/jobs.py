"""What a copier is asked to do and what it answers: plain data, checked before any byte moves.

Used on the worker's main thread (making and submitting jobs) and on the copy thread. Locations are
those of ``xinference_xavier.types``: device row ``r`` is ``r``, host row ``h`` is ``~h``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from xinference_xavier.storage.layout import RowLayout

Indexes = npt.NDArray[np.int64]

NO_INDEXES: Indexes = np.empty(0, np.int64)


class CopyKind(Enum):
    """Direction of a copy: KV blocks to rows, rows to KV blocks, rows to rows."""

    STORE = "store"
    LOAD = "load"
    MOVE = "move"


@dataclass(frozen=True, eq=False)
class CopyJob:
    """One ordered piece of work for a copier.

    ``blocks`` int64 ``[n]``: KV block ids, ordered by KV group; empty for MOVE. ``group_sizes``:
    how many of them belong to each KV group, in group order; ignored for MOVE. ``sources`` int64
    ``[n]``: locations read (LOAD, MOVE), where ``NOWHERE`` is a position that fails. ``targets``
    int64 ``[n]``: locations written (STORE, MOVE).
    """

    job_id: int
    kind: CopyKind
    blocks: Indexes
    group_sizes: tuple[int, ...]
    sources: Indexes
    targets: Indexes

    def __len__(self) -> int:
        return len(self.sources if self.kind is CopyKind.MOVE else self.blocks)

    def groups(self) -> Indexes:
        """The KV group of each position, int64 ``[n]``."""
        return np.repeat(np.arange(len(self.group_sizes), dtype=np.int64), self.group_sizes)

    def payload_bytes(self, layout: RowLayout, failed: Indexes = NO_INDEXES) -> int:
        """Bytes that the job copies when all positions but ``failed`` are copied."""
        if self.kind is CopyKind.MOVE:
            return len(self) * layout.row_bytes
        counts = np.bincount(np.delete(self.groups(), failed), minlength=len(self.group_sizes))
        return sum(n * layout.group_bytes(g) for g, n in enumerate(counts.tolist()) if n)

    def check(self, layout: RowLayout) -> None:
        """Raise if the arrays do not fit each other or ``layout``; rows are checked on use.

        Raises:
            ValueError: lengths or group sizes disagree.
            IndexError: a block id is outside the KV caches.
        """
        lengths = {
            CopyKind.STORE: (len(self.blocks), 0, len(self.blocks)),
            CopyKind.LOAD: (len(self.blocks), len(self.blocks), 0),
            CopyKind.MOVE: (0, len(self.sources), len(self.sources)),
        }[self.kind]
        if (len(self.blocks), len(self.sources), len(self.targets)) != lengths:
            raise ValueError(
                f"{self.kind.value} job {self.job_id} has {len(self.blocks)} blocks, "
                f"{len(self.sources)} sources and {len(self.targets)} targets"
            )
        if self.kind is CopyKind.MOVE:
            return
        if sum(self.group_sizes) != len(self.blocks) or len(self.group_sizes) > len(layout.groups):
            raise ValueError(
                f"{self.kind.value} job {self.job_id}: group sizes {self.group_sizes} do not share "
                f"out {len(self.blocks)} blocks among {len(layout.groups)} KV groups"
            )
        outside = (self.blocks < 0) | (self.blocks >= layout.num_blocks)
        if np.any(outside):
            raise IndexError(
                f"{self.kind.value} job {self.job_id}: block {int(self.blocks[outside][0])} is "
                f"outside the {layout.num_blocks} blocks of the KV cache"
            )


@dataclass(frozen=True, eq=False)
class CopyResult:
    """How a job ended.

    ``ok``: every position was copied. ``failed``: for a LOAD, the positions (indexes into the
    job's arrays) whose block holds no valid bytes; empty for STORE and MOVE, of which nothing may
    be used when ``ok`` is false. ``seconds``: time spent copying, without queueing.
    """

    job_id: int
    kind: CopyKind
    ok: bool
    nbytes: int
    seconds: float
    failed: Indexes = field(default_factory=lambda: NO_INDEXES)
    error: str = ""

    @classmethod
    def of_failure(cls, job: CopyJob, error: BaseException | str, seconds: float) -> CopyResult:
        """The result of a job of which nothing was copied."""
        failed = np.arange(len(job)) if job.kind is CopyKind.LOAD else NO_INDEXES
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return cls(job.job_id, job.kind, False, 0, seconds, failed, text)
