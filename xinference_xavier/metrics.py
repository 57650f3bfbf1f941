"""Every metric, declared once: name, kind, unit, help, labels, and where its values come from.

Plain data. ``host/exporter.py`` fills them, ``docs/metrics.md`` lists them, and the dashboard's
expressions are checked against them.

A path names a number in one replica's statistics (``GET /v1/xavier``), with ``replica`` for what
is known about the replica itself and ``sampler`` for the process that asks. ``*`` stands for every
name at its place, and in the label's value for the name found there: the engine's own bounded sets
of reasons and kinds. No metric is a ratio: those are for the query to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFIX = "xinference:xavier_"


class Kind(Enum):
    """How a metric behaves. A counter begins at 0 with its replica and only grows."""

    COUNTER = "counter"
    GAUGE = "gauge"


#: Labels that a metric may have, and what they hold.
LABELS = {
    "model": "uid of the model",
    "replica": "number of the replica within its model",
    "tier": "`gpu` or `cpu`",
    "source": "where prompt tokens or blocks came from",
    "reason": "why something failed or was left",
    "kind": "what was done",
}


@dataclass(frozen=True)
class Metric:
    """One metric. ``series`` pairs each value of the last label with the path of its number; a
    metric without a label of its own has one series, under ""."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]
    series: tuple[tuple[str, str], ...]

    @property
    def own_label(self) -> str | None:
        """The label beside model and replica."""
        own = [label for label in self.labels if label not in ("model", "replica")]
        return own[0] if own else None


def _one(kind: Kind, name: str, unit: str, path: str, text: str) -> Metric:
    """A metric of one series per replica."""
    return Metric(PREFIX + name, kind, unit, text, ("model", "replica"), (("", path),))


def _by(kind: Kind, name: str, unit: str, label: str, series: dict[str, str], text: str) -> Metric:
    """A metric with a label of its own."""
    labels = ("model", "replica", label)
    return Metric(PREFIX + name, kind, unit, text, labels, tuple(series.items()))


def _tiers(name: str, unit: str, field: str, text: str) -> Metric:
    paths = {tier: f"tiers.{tier}.{field}" for tier in ("gpu", "cpu")}
    return _by(Kind.GAUGE, name, unit, "tier", paths, text)


def _sampler(name: str, path: str, text: str) -> Metric:
    return Metric(PREFIX + name, Kind.COUNTER, "polls", text, (), (("", path),))


_C, _G = Kind.COUNTER, Kind.GAUGE
_SOURCES = ("gpu", "cpu", "peer")
_TIERS = ("gpu", "cpu")
_COSTS = ("load_wait", "fetch_wait", "failed_fetch", "copy", "scheduler")
_RETURNED = ("25", "50", "100", "200", "400", "beyond")

METRICS: tuple[Metric, ...] = (
    _one(_G, "replica_up", "1", "replica.up", "1 if the replica answers, 0 if it does not."),
    _one(
        *(_G, "replica_start_time_seconds", "seconds", "replica.started"),
        "Unix time at which the replica started.",
    ),
    _one(
        *(_G, "heartbeat_age_seconds", "seconds", "replica.heartbeat_age_seconds"),
        "Time since the replica was last heard of.",
    ),
    # -- what is kept
    _tiers("rows", "rows", "rows", "Rows of the tier."),
    _tiers("free_rows", "rows", "free", "Rows that hold nothing."),
    _tiers("moving_rows", "rows", "moving", "Rows on their way to the other tier."),
    _tiers("snapshots", "rows", "snapshots", "Rows that hold a snapshot."),
    _tiers("snapshot_bytes", "bytes", "bytes", "Bytes of the snapshots."),
    _tiers("snapshot_tokens", "tokens", "tokens", "Tokens of the snapshots."),
    _tiers("budget_bytes", "bytes", "budget_bytes", "Bytes that the tier may take."),
    _one(
        *(_G, "shadowed_rows", "rows", "shadowed_rows"),
        "Rows whose blocks the engine's own prefix cache holds too.",
    ),
    _one(_G, "jobs_in_flight", "jobs", "jobs_in_flight", "Copy jobs and fetches under way."),
    # -- what was asked
    _one(
        *(_C, "requests_total", "requests", "counters.requests"),
        "Requests whose prompt has been placed.",
    ),
    _by(
        *(_C, "prompt_tokens_total", "tokens", "source"),
        {s: f"counters.tokens_{s}" for s in ("engine", *_SOURCES, "computed")},
        "Prompt tokens by where they came from; `engine` is vLLM's own prefix cache.",
    ),
    _by(
        *(_C, "hit_blocks_total", "blocks", "source"),
        {s: f"counters.hits_{s}_blocks" for s in _SOURCES},
        "Blocks that requests loaded.",
    ),
    _one(
        *(_C, "missed_blocks_total", "blocks", "counters.misses_blocks"),
        "Full prompt blocks that had to be computed.",
    ),
    # -- what was done
    _by(
        *(_C, "stored_blocks_total", "blocks", "tier"),
        {tier: f"counters.stored_{tier}" for tier in _TIERS},
        "Blocks stored into the tier.",
    ),
    _by(
        *(_C, "skipped_blocks_total", "blocks", "reason"),
        {"*": "skips.*"},
        "Blocks that were not stored.",
    ),
    _by(
        *(_C, "moved_blocks_total", "blocks", "kind"),
        {
            "demotion": "counters.demotions",
            "promotion": "counters.promotions",
            "relocation": "counters.relocations",
            "dropped": "counters.moves_dropped",
        },
        "Snapshots moved between the tiers, or within one that shrinks (`relocation`); `dropped` "
        "were copied and not needed.",
    ),
    _by(
        *(_C, "evicted_blocks_total", "blocks", "tier"),
        {tier: f"counters.evictions_{tier}" for tier in _TIERS},
        "Snapshots dropped from the tier to make room.",
    ),
    _by(
        *(_C, "recomputed_evictions_total", "blocks", "kind"),
        {name: f"reuse.returned_{name}" for name in _RETURNED},
        "Evicted blocks that were computed again, by how much larger the tier would have had to "
        "be to keep them, in percent.",
    ),
    _by(
        *(_C, "copies_total", "jobs", "kind"),
        {"*": "copies.*.jobs"},
        "Copy jobs that ended, one per rank.",
    ),
    _by(
        *(_C, "copied_bytes_total", "bytes", "kind"),
        {"*": "copies.*.nbytes"},
        "Bytes copied, of all ranks.",
    ),
    _by(
        *(_C, "copy_seconds_total", "seconds", "kind"),
        {"*": "copies.*.seconds"},
        "Time spent copying, of all ranks.",
    ),
    _by(
        *(_C, "faults_total", "faults", "reason"),
        {
            "copy": "counters.failed_copies",
            "mismatch": "counters.mismatches",
            "fetch_*": "sharing.fetch_failures.*",
            "internal_*": "swallowed.*",
        },
        "Copies and fetches that failed, and loads whose bytes were not those stored.",
    ),
    # -- sharing
    _one(_G, "peers", "replicas", "sharing.peers", "Replicas that it can read from now."),
    _one(_G, "leases", "leases", "sharing.leases", "Leases that other replicas hold."),
    _one(_G, "leased_rows", "rows", "sharing.leased_rows", "Rows kept by those leases."),
    _one(
        *(_G, "quarantined_rows", "rows", "sharing.quarantined_rows"),
        "Rows that a late read may still write to.",
    ),
    _one(_C, "leases_granted_total", "leases", "sharing.leases_granted", "Leases granted."),
    _one(
        *(_C, "leases_expired_total", "leases", "sharing.leases_expired"),
        "Leases that ended by their time to live.",
    ),
    _one(_C, "fetches_total", "fetches", "sharing.fetches", "Fetches begun."),
    _by(
        *(_C, "skipped_fetches_total", "fetches", "reason"),
        {"*": "sharing.fetches_skipped.*"},
        "Fetches that were not begun.",
    ),
    _one(
        *(_C, "fetched_blocks_total", "blocks", "counters.fetched"),
        "Blocks that arrived from other replicas.",
    ),
    _one(
        *(_C, "fetched_bytes_total", "bytes", "sharing.fetched_bytes"),
        "Bytes that arrived from other replicas, of all ranks.",
    ),
    _one(
        *(_C, "fetch_seconds_total", "seconds", "sharing.fetch_seconds"),
        "Time spent in fetches.",
    ),
    _one(
        *(_C, "fetch_read_seconds_total", "seconds", "sharing.read_seconds"),
        "Time of fetches that was spent reading.",
    ),
    # -- what it is worth
    _one(
        *(_C, "saved_seconds_total", "seconds", "accounts.saved_seconds"),
        "Prefill time of loaded tokens at the measured speed.",
    ),
    _by(
        *(_C, "cost_seconds_total", "seconds", "kind"),
        {cost: f"accounts.{cost}_seconds" for cost in _COSTS},
        "Time that the cache took; saved seconds less these are its net seconds.",
    ),
    # -- the process that asks
    _sampler("sampler_polls_total", "sampler.polls", "Times the replicas were asked."),
    _sampler("sampler_errors_total", "sampler.errors", "Times the supervisor did not answer."),
)
