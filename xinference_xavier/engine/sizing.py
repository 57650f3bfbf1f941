"""How many rows each tier of one rank gets. Runs in the worker process, before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from xinference_xavier.budgets import registration_locks_memory, row_problem
from xinference_xavier.types import CapacityError

_CGROUP = Path("/sys/fs/cgroup")

#: How far a budget can grow without a new launch: so many times, or to so many rows.
GROWTH, GROWTH_ROWS = 4, 65_536


@dataclass(frozen=True)
class RankBudget:
    """What one rank's share of the budgets must hold.

    Attributes:
        gpu_bytes: device bytes of the whole replica.
        cpu_bytes: host bytes of the whole replica, or "auto".
        ranks: ranks of the replica.
        local_replicas: replicas that share this machine's memory.
    """

    gpu_bytes: int
    cpu_bytes: int | Literal["auto"]
    ranks: int
    local_replicas: int

    def gpu_rows(self, row_bytes: int) -> int:
        return self._rows("xavier_gpu_budget", self.gpu_bytes, row_bytes)

    def cpu_rows(self, row_bytes: int, pool_bytes: int) -> int:
        """Rows of the CPU tier; "auto" is twice the rank's KV pool, at most its share of half
        the memory that is available now."""
        if self.cpu_bytes != "auto":
            return self._rows("xavier_cpu_budget", self.cpu_bytes, row_bytes)
        share = available_memory() // 2 // (self.local_replicas * self.ranks)
        return min(2 * pool_bytes, share) // row_bytes

    def _rows(self, option: str, budget: int, row_bytes: int) -> int:
        problem = row_problem(option, budget, row_bytes * self.ranks)
        if problem is not None:
            raise CapacityError(problem)
        return budget // self.ranks // row_bytes


def most_rows(rows: int, row_bytes: int, ranks: int) -> int:
    """Rows that a tier of one rank gets address space for, so that its budget can grow later.

    As much as the machine has, within limits: each row costs a peer some bytes of description.
    Where NIXL locks what it registers, no more than the rows themselves.
    """
    if registration_locks_memory():
        return rows
    machine = int(psutil.virtual_memory().total) // ranks // row_bytes
    return max(rows, min(machine, max(GROWTH * rows, GROWTH_ROWS)))


def available_memory() -> int:
    """Bytes this process may still use: the machine's, or its cgroup's if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))
