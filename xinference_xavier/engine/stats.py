"""A replica's numbers, for the API and the panel. Runs on the bridge's thread; only reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from xinference_xavier import swallowed
from xinference_xavier.engine import compat
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.settings import EngineSettings
from xinference_xavier.policy.columns import RowState
from xinference_xavier.policy.tier import TierRows
from xinference_xavier.types import Tier

#: Counting shadowed rows looks at every block of the engine; not more often than this.
SHADOW_SECONDS = 5.0


class Stats:
    """Collects what the manager counted into one plain dictionary."""

    def __init__(self, manager: XavierManager, settings: EngineSettings) -> None:
        self._manager = manager
        self._settings = settings
        #: How many replicas this one can read from now.
        self.peers: Callable[[], int] = lambda: 0
        #: vLLM's block pool, once the scheduler has made it.
        self.block_pool: Any = None
        self._shadowed = 0
        self._shadowed_at = float("-inf")

    def identity(self) -> dict[str, Any]:
        """Who this replica is."""
        return {
            "model_uid": self._settings.model_uid,
            "replica": self._settings.replica,
            "options": self._settings.options.model_dump(),
        }

    def collect(self) -> dict[str, Any]:
        """Rows, snapshots, bytes and tokens by tier, and every counter."""
        manager, options = self._manager, self._settings.options
        capacity = manager.capacity
        return {
            "tiers": {
                "gpu": self._tier(
                    manager.index.gpu, manager.budgets.get(Tier.GPU, options.xavier_gpu_budget)
                ),
                "cpu": self._tier(
                    manager.index.cpu,
                    manager.budgets.get(Tier.CPU, self._launched_cpu_budget()),
                ),
            },
            "counters": self._counters(),
            "skips": dict(manager.planner.counters.skips),
            "stores_paused": manager.planner.paused,
            "copies": {kind: work._asdict() for kind, work in dict(manager.copied).items()},
            "requests": [asdict(receipt) for receipt in tuple(manager.receipts.recent)],
            "shadowed_rows": self._count_shadowed(),
            "jobs_in_flight": len(manager.ledger) + manager.planner.fetches.flying,
            "sharing": self._sharing(),
            "swallowed": swallowed.counts(),
            "accounts": manager.accounts.as_dict(dict(manager.copied), manager.ranks),
            "reuse": manager.index.ghosts.as_dict(),
            "row_bytes": capacity.row_bytes,
            "block_tokens": manager.block_tokens[manager.counted_group],
            "kv_groups": len(manager.block_tokens),
            "pool_blocks": capacity.pool_blocks,
            "ranks": manager.ranks,
        }

    def _launched_cpu_budget(self) -> int:
        budget, capacity = self._settings.options.xavier_cpu_budget, self._manager.capacity
        return capacity.cpu_rows * capacity.row_bytes if budget == "auto" else budget

    def _sharing(self) -> dict[str, Any]:
        """Fetches from peers, and leases that peers hold."""
        manager = self._manager
        return {
            **manager.fetching.as_dict(),
            "fetched_bytes": manager.planner.counters.fetched * manager.capacity.row_bytes,
            "doubted_blocks": manager.doubted,
            "quarantined_rows": manager.planner.fetches.quarantined_rows,
            "peers": self.peers(),
            "leases": len(manager.leases),
            "leased_rows": manager.leases.rows,
            "leases_granted": manager.leases.granted,
            "leases_expired": manager.leases.expired,
        }

    def _tier(self, tier: TierRows, budget_bytes: int) -> dict[str, int]:
        manager = self._manager
        tokens = manager.block_tokens[manager.counted_group]
        return {
            "rows": tier.rows,
            "snapshots": tier.snapshots,
            "free": tier.free,
            "leaving": tier.leaving,
            "moving": tier.counts[RowState.LEAVING],
            "bytes": tier.snapshots * manager.capacity.row_bytes,
            "budget_bytes": budget_bytes,
            "tokens": tier.snapshots * tokens // len(manager.block_tokens),
        }

    def _counters(self) -> dict[str, int]:
        manager = self._manager
        return {
            **manager.receipts.as_dict(),
            **manager.planner.counters.as_dict(),
            "mismatches": manager.mismatches,
        }

    def _count_shadowed(self) -> int:
        """Snapshots that the engine's own prefix cache holds too."""
        now = time.monotonic()
        if self.block_pool is not None and now - self._shadowed_at >= SHADOW_SECONDS:
            self._shadowed = compat.cached_by_engine(self.block_pool, self._manager.index)
            self._shadowed_at = now
        return self._shadowed
