"""Sentences for budgets that do not fit, and the arithmetic behind them.

Covers: numbers that the caller has read or estimated, the same rules for the API before a launch
and for the engine once it knows. Plain functions, any process and thread.
"""

from __future__ import annotations

import resource
from pathlib import Path

_INFINIBAND = Path("/sys/class/infiniband")


def row_problem(option: str, budget_bytes: int, row_bytes: int) -> str | None:
    """Why a budget cannot hold one row, or None. A budget of 0 means no tier at all."""
    if budget_bytes == 0 or budget_bytes >= row_bytes:
        return None
    return (
        f"{option}={budget_bytes} is below one row: a row (one KV block of all layers) of this "
        f"model takes {row_bytes} bytes. Give at least {row_bytes}, or 0 to switch the tier off."
    )


def registration_locks_memory() -> bool:
    """True where NIXL registers host memory with an RDMA device, which locks its pages.

    Without such a device transfers go through shared memory or TCP, and pages that CUDA pins are
    not counted against the limit.
    """
    try:
        return any(_INFINIBAND.iterdir())
    except OSError:
        return False


def locked_memory_limit() -> int | None:
    """Bytes this process may lock, where registration locks memory; else None."""
    if not registration_locks_memory():
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memlock_problem(host_budget_bytes: int, limit_bytes: int | None) -> str | None:
    """Why the host tier cannot be locked in memory, or None. No limit is ``limit_bytes=None``."""
    if limit_bytes is None or host_budget_bytes <= limit_bytes:
        return None
    return (
        f"xavier_cpu_budget={host_budget_bytes} is above the limit of {limit_bytes} bytes for "
        "locked memory, and the RDMA device of this machine locks what it reads. Raise the limit "
        "(ulimit -l unlimited, or LimitMEMLOCK=infinity for a service), or give "
        f"xavier_cpu_budget={limit_bytes} or less."
    )


def shadow_warning(cpu_tier_tokens: int, pool_tokens: int) -> str | None:
    """Warning when the CPU tier holds fewer tokens than the engine's own KV pool, or None."""
    if cpu_tier_tokens == 0 or cpu_tier_tokens >= pool_tokens:
        return None
    return (
        f"xavier_cpu_budget holds {cpu_tier_tokens} tokens and the engine's KV pool {pool_tokens}: "
        "such a tier mostly repeats what the engine still has. Give it more than the pool."
    )
