"""CUDA jobs in flight, and which of them last used each row and each KV block.

So that a later job can be ordered behind an earlier one. Index arithmetic only. Reads and writes
count alike: it is rare for two jobs in flight to meet in a row at all, since the policy reuses a
row only after the jobs on it were acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xinference_xavier.storage.cuda_runtime import Event
from xinference_xavier.storage.jobs import CopyJob, Indexes


@dataclass(eq=False)
class Flight:
    """A submitted job: ``touched`` is done when its KV blocks are, ``ends`` when all of it is."""

    job: CopyJob
    sequence: int
    start: Event | None = None
    touched: list[Event] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    error: str = ""
    expected: dict[int, int] = field(default_factory=dict)


class LastUse:
    """Sequence numbers of jobs by memory and row, and by KV block; 0 stands for no job."""

    def __init__(self, memory_rows: Sequence[int], num_blocks: int) -> None:
        """``memory_rows``: rows of each memory of a ``RowMap``."""
        self._rows = [np.zeros(rows, np.int64) for rows in memory_rows]
        self._blocks = np.zeros(num_blocks, np.int64)

    def claim_rows(self, memory: Indexes, rows: Indexes, sequence: int) -> set[int]:
        """Note ``sequence`` on rows; the jobs that used them before."""
        earlier: set[int] = set()
        for index in np.unique(memory).tolist():
            mine = rows[memory == index]
            earlier.update(np.unique(self._rows[index][mine]).tolist())
            self._rows[index][mine] = sequence
        return earlier - {0, sequence}

    def claim_blocks(self, blocks: Indexes, sequence: int) -> set[int]:
        """Note ``sequence`` on KV blocks; the jobs that used them before."""
        earlier = set(np.unique(self._blocks[blocks]).tolist())
        self._blocks[blocks] = sequence
        return earlier - {0, sequence}
