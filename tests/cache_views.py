"""Replicas as the API sees them, with the statistics that an engine reports, made by hand."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from xinference_xavier.host.history import Past, Point, Sample
from xinference_xavier.host.view import ModelView, ReplicaView

TIER = {"rows": 0, "snapshots": 0, "free": 0, "moving": 0}
TIER |= {"bytes": 0, "budget_bytes": 0, "tokens": 0}
COUNTERS = (
    *("requests", "tokens_prompt", "tokens_engine", "tokens_gpu", "tokens_cpu", "tokens_peer"),
    *("tokens_computed", "hits_gpu_blocks", "hits_cpu_blocks", "hits_peer_blocks"),
    *("misses_blocks", "stored_gpu", "stored_cpu", "fetched", "demotions", "promotions"),
    *("moves_dropped", "evictions_gpu", "evictions_cpu", "failed_copies", "mismatches"),
)
ACCOUNTS = (
    *("saved_seconds", "load_wait_seconds", "fetch_wait_seconds", "failed_fetch_seconds"),
    *("copy_seconds", "scheduler_seconds", "net_seconds"),
)
RETURNED = ("25", "50", "100", "200", "400", "beyond")


def stats(**changed: Any) -> dict[str, Any]:
    """One engine's statistics, all counters 0; ``changed`` by dotted path with ``__``."""
    made: dict[str, Any] = {
        "tiers": {"gpu": {**TIER, "rows": 100}, "cpu": {**TIER, "rows": 400}},
        "counters": dict.fromkeys(COUNTERS, 0),
        "skips": {"prompt_exceeds_tier": 0},
        "copies": {k: {"jobs": 0, "nbytes": 0, "seconds": 0.0} for k in ("store", "load", "move")},
        "requests": [],
        "shadowed_rows": 0,
        "jobs_in_flight": 0,
        "sharing": {
            "fetches": 0,
            "fetch_failures": {},
            "fetches_skipped": {},
            "fetch_seconds": 0.0,
            "read_seconds": 0.0,
            "fetched_bytes": 0,
            "quarantined_rows": 0,
            "peers": 0,
            "leases": 0,
            "leased_rows": 0,
            "leases_granted": 0,
            "leases_expired": 0,
            "min_fetch_tokens": 0,
        },
        "accounts": {**dict.fromkeys(ACCOUNTS, 0.0), "prefill_tokens_per_second": 1000.0},
        "reuse": {"evicted": 0, **{f"returned_{name}": 0 for name in RETURNED}},
        "row_bytes": 2**20,
        "block_tokens": 16,
        "kv_groups": 1,
        "pool_blocks": 200,
        "ranks": 1,
    }
    change(made, **changed)
    return made


def change(made: dict[str, Any], **changed: Any) -> None:
    for path, value in changed.items():
        *parents, last = path.split("__")
        node = made
        for parent in parents:
            node = node[parent]
        node[last] = value


def replica(number: int = 0, started: float = 1000.0, **fields: Any) -> ReplicaView:
    given: dict[str, Any] = {
        "replica": number,
        "state": "running",
        "address": f"127.0.0.1:{9000 + number}",
        "pid": 100 + number,
        "started": started,
        "heartbeat_age_seconds": 0.5,
        "stale": False,
        "options": {},
        "share": None,
        "stats": stats(),
        **fields,
    }
    return ReplicaView(**given)


def model(*replicas: ReplicaView, uid: str = "m") -> ModelView:
    return ModelView(model_uid=uid, enabled=True, replicas=list(replicas))


def history(*stages: dict[str, Any], apart: float = 60.0) -> tuple[ModelView, deque[Point]]:
    """One replica's stages, ``apart`` seconds each: the last view, and the points."""
    past, view = Past(), model()
    for number, stage in enumerate(stages):
        view = model(replica(stats=copy.deepcopy(stats(**stage))))
        past.add(Sample(2000.0 + apart * number, apart * number, [view]), view)
    return view, past.points
