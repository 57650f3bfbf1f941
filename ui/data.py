"""What the panel says, from what the sampler keeps: figures, series, tables, sentences.

Covers: which numbers, under which labels, over which time. Does not cover how they look
(``render.py``, ``charts.py``). Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xinference_xavier.host.events import Event
from xinference_xavier.host.sampler import Point
from xinference_xavier.host.summary import ModelNumbers, TierNumbers, faults_of
from xinference_xavier.host.view import ModelView, ReplicaView

from .units import bytes_text, clock_text, count_text, seconds_text

#: Most lines of the event log, the newest first.
MOST_EVENTS = 60

KINDS = {
    "replica_up": "replica up",
    "replica_gone": "replica gone",
    "replica_restarted": "replica restarted",
    "demotion_burst": "demotion burst",
    "fault": "fault",
    "parity": "not sharing",
    "not_answering": "no answer",
    "answering": "answers again",
}


@dataclass(frozen=True)
class Figure:
    """One number of the first row. ``note`` says what it is part of."""

    label: str
    value: str
    note: str = ""
    #: True where somebody should look: said in words beside the colour.
    alarm: bool = False


@dataclass(frozen=True)
class Table:
    """``rows`` of texts under ``columns``; the first column heads each row."""

    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def figures(numbers: ModelNumbers) -> list[Figure]:
    """The row of plain numbers."""
    return [*_tier_figures(numbers), *_use_figures(numbers), *_health_figures(numbers)]


def _tier_figures(numbers: ModelNumbers) -> list[Figure]:
    found = []
    for name, tier in (("GPU", numbers.gpu), ("CPU", numbers.cpu)):
        share = f"{_percent(tier.snapshots, tier.rows)} of the rows" if tier.rows else "tier is off"
        pair = f"{count_text(tier.snapshots)} / {count_text(tier.rows)}"
        found.append(Figure(f"{name} snapshots", pair, share))
        budget = f"of a budget of {bytes_text(tier.budget_bytes)}"
        found.append(Figure(f"{name} bytes", bytes_text(tier.bytes), budget))
    rates = numbers.rates
    totals = (
        ("Demotions", rates.demotions_per_minute if rates else None, numbers.demotions),
        ("Evictions", rates.evictions_per_minute if rates else None, _evictions(numbers)),
    )
    for label, rate, total in totals:
        value = "–" if rate is None else f"{count_text(rate)} / min"
        found.append(Figure(label, value, f"{count_text(total)} in all"))
    return found


def _use_figures(numbers: ModelNumbers) -> list[Figure]:
    hits = (
        ("GPU hits", numbers.hits_gpu_blocks, numbers.hits_gpu_tokens),
        ("CPU hits", numbers.hits_cpu_blocks, numbers.hits_cpu_tokens),
        ("Peer hits", numbers.hits_peer_blocks, numbers.hits_peer_tokens),
    )
    found = [
        Figure(label, count_text(blocks), f"blocks; {count_text(tokens)} tokens")
        for label, blocks, tokens in hits
    ]
    misses = Figure("Misses", count_text(numbers.misses_blocks), "blocks asked for in vain")
    share = f"{_percent(numbers.tokens_saved, numbers.tokens_prompt)} of the prompts' tokens"
    saved = Figure("Tokens saved", count_text(numbers.tokens_saved), share)
    harm = numbers.net_seconds < 0
    note = "lost: the cache does harm" if harm else "saved, less copies, waits and failures"
    net = Figure("Net time", seconds_text(numbers.net_seconds), note, alarm=harm)
    return [*found, misses, saved, net]


def _health_figures(numbers: ModelNumbers) -> list[Figure]:
    reasons = ", ".join(
        f"{reason.replace('_', ' ')}: {count_text(count)}"
        for reason, count in numbers.faults_by_reason.items()
    )
    return [
        Figure(
            "Shadowed rows",
            count_text(numbers.shadowed_rows),
            "the engine's own cache has them too",
        ),
        Figure("Leases", count_text(numbers.leases), f"on {count_text(numbers.leased_rows)} rows"),
        Figure(
            "Quarantined rows",
            count_text(numbers.quarantined_rows),
            "a late read may still write to them",
            alarm=numbers.quarantined_rows > 0,
        ),
        Figure(
            "Faults",
            count_text(numbers.faults),
            reasons or "none: no copy or read has failed",
            alarm=numbers.faults > 0,
        ),
    ]


def _evictions(numbers: ModelNumbers) -> int:
    return numbers.evictions_gpu + numbers.evictions_cpu


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def replica_table(model: ModelView) -> Table:
    """One line per replica, with its namespace verdict."""
    columns = ("replica", "state", "GPU snapshots", "CPU snapshots", "tokens saved", "faults")
    rows = [(*_replica_cells(replica), verdict(replica)) for replica in model.replicas]
    return Table(f"Replicas of {model.model_uid}", (*columns, "sharing"), rows)


def _replica_cells(replica: ReplicaView) -> tuple[str, ...]:
    state = f"{replica.state}, does not answer" if replica.stale else replica.state
    stats = replica.stats
    if stats is None:
        return (str(replica.replica), state, "–", "–", "–", "–")
    tiers = [
        f"{count_text(tier['snapshots'])} / {count_text(tier['rows'])}"
        for tier in (stats["tiers"]["gpu"], stats["tiers"]["cpu"])
    ]
    counters = stats["counters"]
    saved = sum(counters[f"tokens_{source}"] for source in ("gpu", "cpu", "peer"))
    faults = sum(faults_of([stats]).values())
    return (str(replica.replica), state, *tiers, count_text(saved), count_text(faults))


def verdict(replica: ReplicaView) -> str:
    """With whom a replica shares, with whom not, and which field differs."""
    share = replica.share
    if share is None:
        return "Not known while its engine starts."
    said = []
    if share.problem:
        said.append(f"Shares with nobody: {share.problem}")
    elif share.shares_with:
        names = ", ".join(f"{peer.model_uid}/{peer.replica}" for peer in share.shares_with)
        said.append(f"Shares with {names}.")
    else:
        said.append("Shares with no replica: there is none in its namespace.")
    for peer in share.not_with:
        why = peer.why.removesuffix(".")
        said.append(f"Not with {peer.model_uid}/{peer.replica}: {why}.")
    return " ".join(said)


def event_table(events: Iterable[Event], model_uid: str) -> Table:
    """The log of one model, the newest first, with what concerns no model."""
    chosen = [event for event in events if event.model_uid in ("", model_uid)]
    rows: list[tuple[str, ...]] = [
        (
            clock_text(event.at),
            "–" if event.replica is None else str(event.replica),
            KINDS.get(event.kind, event.kind),
            event.text,
        )
        for event in reversed(chosen[-MOST_EVENTS:])
    ]
    return Table(f"Events of {model_uid}", ("time (UTC)", "replica", "kind", "what"), rows)


@dataclass(frozen=True)
class Window:
    """``buckets`` equal parts of the time before ``end``, in Unix seconds.

    ``since``: when the first sample was taken. What is drawn begins there where that is later than
    the window, but spans a minute at least.
    """

    end: float
    seconds: float
    interval_seconds: float
    since: float = 0.0

    @property
    def span(self) -> float:
        """Seconds that are drawn."""
        return min(self.seconds, max(60.0, self.end - self.since))

    @property
    def buckets(self) -> int:
        """So many that each part holds a sample, and at most 120."""
        return max(2, min(120, int(self.span / (1.5 * self.interval_seconds))))

    def times(self) -> list[float]:
        """End of each part."""
        step = self.span / self.buckets
        return [self.end - step * (self.buckets - 1 - number) for number in range(self.buckets)]

    def thin(
        self,
        points: Sequence[Point],
        value: Callable[[ModelNumbers], float | None],
        pick: Callable[[list[float]], float],
    ) -> list[float | None]:
        """One value for each part, None where there was no sample: a line breaks there.

        The newest part shows its newest value, as the figures above the plots do.
        """
        step = self.span / self.buckets
        found: list[list[float]] = [[] for _ in range(self.buckets)]
        for point in points:
            number = self.buckets - 1 - int((self.end - point.at) / step)
            told = value(point.numbers)
            if 0 <= number < self.buckets and told is not None:
                found[number].append(told)
        parts = [pick(values) if values else None for values in found[:-1]]
        return [*parts, newest(found[-1]) if found[-1] else None]


def newest(values: list[float]) -> float:
    """For levels: the part's last value."""
    return values[-1]


def tier_of(name: str) -> Callable[[ModelNumbers], TierNumbers]:
    """Reads one tier of a model's numbers."""
    return lambda numbers: numbers.gpu if name == "gpu" else numbers.cpu
