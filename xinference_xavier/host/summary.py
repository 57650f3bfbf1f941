"""One model's numbers: sums over its replicas, and rates between two points in time.

Pure functions of what ``view.py`` gathered. A replica without statistics (its engine loads) counts
as a replica and adds nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xinference_xavier.host.counters import Counts
from xinference_xavier.host.view import ModelView

#: Ways in which bytes move: the kinds of copies, and reads from peers.
TRANSFERS = ("store", "load", "move", "fetch")
#: Where loaded tokens come from.
SOURCES = ("gpu", "cpu", "peer")
#: What is taken from the seconds saved; the engine's accounts say what each is.
COSTS = (
    "load_wait_seconds",
    "fetch_wait_seconds",
    "failed_fetch_seconds",
    "copy_seconds",
    "scheduler_seconds",
)
#: Counters that are shown under their own name.
_SAME = (
    *("requests", "tokens_prompt", "tokens_engine", "tokens_computed"),
    *("hits_gpu_blocks", "hits_cpu_blocks", "hits_peer_blocks", "misses_blocks"),
    *("demotions", "promotions", "evictions_gpu", "evictions_cpu"),
)


@dataclass(frozen=True, slots=True)
class TierNumbers:
    """One tier. ``rows`` is its capacity, and ``snapshots`` of them are filled."""

    rows: int = 0
    snapshots: int = 0
    free: int = 0
    moving: int = 0
    bytes: int = 0
    budget_bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelRates:
    """What happened within ``seconds``, the time between two points."""

    seconds: float
    demotions_per_minute: float
    promotions_per_minute: float
    evictions_per_minute: float
    faults_per_minute: float
    requests_per_second: float
    hit_tokens_per_second: dict[str, float]
    computed_tokens_per_second: float
    #: By way of transfer (``TRANSFERS``).
    transfer_bytes_per_second: dict[str, float]
    #: Net seconds won per second of time; below zero the cache does harm.
    net_seconds_per_second: float


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """Sums over a model's replicas, as they report now: a replica that restarts begins at 0."""

    replicas: int = 0
    #: Those whose engine has reported statistics; and those that did not answer just now.
    reporting: int = 0
    stale: int = 0
    gpu: TierNumbers = field(default_factory=TierNumbers)
    cpu: TierNumbers = field(default_factory=TierNumbers)
    requests: int = 0
    tokens_prompt: int = 0
    #: Found in vLLM's own prefix cache, and computed.
    tokens_engine: int = 0
    tokens_computed: int = 0
    hits_gpu_tokens: int = 0
    hits_cpu_tokens: int = 0
    hits_peer_tokens: int = 0
    hits_gpu_blocks: int = 0
    hits_cpu_blocks: int = 0
    hits_peer_blocks: int = 0
    misses_blocks: int = 0
    #: Prompt tokens that were loaded and not computed.
    tokens_saved: int = 0
    demotions: int = 0
    promotions: int = 0
    evictions_gpu: int = 0
    evictions_cpu: int = 0
    shadowed_rows: int = 0
    leases: int = 0
    leased_rows: int = 0
    quarantined_rows: int = 0
    faults: int = 0
    #: "copy", "mismatch", "internal_" and where, or "fetch_" and why the fetch failed. Only those
    #: that occurred.
    faults_by_reason: dict[str, int] = field(default_factory=dict)
    #: What the cache has won, as ``engine/accounts.py`` defines it; negative: it does harm.
    net_seconds: float = 0.0
    saved_seconds: float = 0.0
    #: Over the last few samples; None before the second one.
    rates: ModelRates | None = None


def summarize(model: ModelView) -> ModelNumbers:
    """The model's numbers, without rates."""
    every = [replica.stats for replica in model.replicas if replica.stats is not None]
    counters = _sum(stats["counters"] for stats in every)
    sharing = _sum(stats.get("sharing") or {} for stats in every)
    accounts = _sum(stats.get("accounts") or {} for stats in every)
    faults = faults_of(every)
    hits = {s: int(counters[f"tokens_{s}"]) for s in SOURCES}
    return ModelNumbers(
        replicas=len(model.replicas),
        reporting=len(every),
        stale=sum(replica.stale for replica in model.replicas),
        gpu=_tier(every, "gpu"),
        cpu=_tier(every, "cpu"),
        hits_gpu_tokens=hits["gpu"],
        hits_cpu_tokens=hits["cpu"],
        hits_peer_tokens=hits["peer"],
        tokens_saved=sum(hits.values()),
        shadowed_rows=sum(stats.get("shadowed_rows", 0) for stats in every),
        leases=int(sharing["leases"]),
        leased_rows=int(sharing["leased_rows"]),
        quarantined_rows=int(sharing["quarantined_rows"]),
        faults=sum(faults.values()),
        faults_by_reason=faults,
        net_seconds=accounts["net_seconds"],
        saved_seconds=accounts["saved_seconds"],
        **{name: int(counters[name]) for name in _SAME},  # type: ignore[arg-type]
    )


def faults_of(every: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Faults in these statistics by reason, without those that never occurred."""
    found: Counter[str] = Counter()
    for stats in every:
        found["copy"] += stats["counters"].get("failed_copies", 0)
        found["mismatch"] += stats["counters"].get("mismatches", 0)
        for reason, count in stats.get("swallowed", {}).items():
            found[f"internal_{reason}"] += count
        for reason, count in (stats.get("sharing") or {}).get("fetch_failures", {}).items():
            found[f"fetch_{reason}"] += count
    return {reason: count for reason, count in sorted(found.items()) if count}


def rates(earlier: Counts, later: Counts, seconds: float) -> ModelRates | None:
    """What grew between two points ``seconds`` apart; None if no time has passed."""
    if seconds <= 0:
        return None

    def grown(*paths: str) -> float:
        return sum(later[path] - earlier[path] for path in paths)

    def minute(*paths: str) -> float:
        return 60.0 * grown(*paths) / seconds

    groups = ("sharing.fetch_failures.", "swallowed.")
    failures = [group + reason for group in groups for reason in later.under(group)]
    transfers = {kind: grown(f"copies.{kind}.nbytes") / seconds for kind in TRANSFERS[:-1]}
    transfers["fetch"] = grown("sharing.fetched_bytes") / seconds
    return ModelRates(
        seconds=seconds,
        demotions_per_minute=minute("counters.demotions"),
        promotions_per_minute=minute("counters.promotions"),
        evictions_per_minute=minute("counters.evictions_gpu", "counters.evictions_cpu"),
        faults_per_minute=minute("counters.failed_copies", "counters.mismatches", *failures),
        requests_per_second=grown("counters.requests") / seconds,
        hit_tokens_per_second={
            source: grown(f"counters.tokens_{source}") / seconds for source in SOURCES
        },
        computed_tokens_per_second=grown("counters.tokens_computed") / seconds,
        transfer_bytes_per_second=transfers,
        net_seconds_per_second=net_growth(earlier, later) / seconds,
    )


def net_growth(earlier: Counts, later: Counts) -> float:
    """Net seconds won between two points: what was saved less every cost."""

    def grown(name: str) -> float:
        return later[f"accounts.{name}"] - earlier[f"accounts.{name}"]

    return grown("saved_seconds") - sum(grown(cost) for cost in COSTS)


def _sum(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums of the numbers by name, 0 for every other name."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update({name: n for name, n in part.items() if isinstance(n, (int, float))})
    return total  # type: ignore[return-value]


def _tier(every: Iterable[Mapping[str, Any]], name: str) -> TierNumbers:
    total = _sum(stats["tiers"][name] for stats in every)
    return TierNumbers(**{field: int(total[field]) for field in TierNumbers.__slots__})
