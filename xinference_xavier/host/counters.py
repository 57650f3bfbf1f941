"""Counters of replicas as one flat table, and how fast they grow.

Covers: names for the counters in a replica's statistics, and sums over a model's replicas that
never fall, whoever restarts. Does not cover gauges (``summary.py``). Pure functions of plain data,
except ``Growth``, which belongs to the one sampler.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Sections of the statistics in which every number is a counter, at any depth.
_SECTIONS = ("counters", "skips", "copies", "accounts", "reuse")
#: Numbers of those sections that may fall.
_NOT_COUNTERS = frozenset({"accounts.net_seconds", "accounts.prefill_tokens_per_second"})
_SHARING = (
    "fetches",
    "fetch_failures",
    "fetches_skipped",
    "fetch_seconds",
    "read_seconds",
    "fetched_bytes",
    "leases_granted",
    "leases_expired",
)


def counters_of(stats: Mapping[str, Any] | None) -> dict[str, float]:
    """Every counter by its dotted path, such as ``copies.load.nbytes``."""
    if stats is None:
        return {}
    sharing = stats.get("sharing") or {}
    parts = {name: stats.get(name) for name in _SECTIONS}
    parts["sharing"] = {name: sharing.get(name) for name in _SHARING}
    return {path: n for path, n in _numbers(parts, "") if path not in _NOT_COUNTERS}


def _numbers(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + name, float(value)


class Counts:
    """Values of counters at one time. Many of them share one table of names."""

    __slots__ = ("_places", "_values")

    def __init__(self, places: Mapping[str, int], values: Iterable[float]) -> None:
        self._places = places
        self._values = array("d", values)

    def __getitem__(self, path: str) -> float:
        """The value; 0 for a counter that was not there yet."""
        place = self._places.get(path)
        return self._values[place] if place is not None and place < len(self._values) else 0.0

    def under(self, prefix: str) -> dict[str, float]:
        """Counters whose path begins with ``prefix``, by the rest of the path."""
        return {p.removeprefix(prefix): self[p] for p in self._places if p.startswith(prefix)}


class Growth:
    """How much one model's counters have grown since it was first seen.

    A replica that restarts (another ``started``) or disappears takes nothing away. The counts
    that a replica brings when it is first seen are no growth, unless it started in our time.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._values: list[float] = []
        #: Replica -> when it started, and its counters when it was last heard of.
        self._last: dict[int, tuple[float, dict[str, float]]] = {}
        self._since: float | None = None

    def note(self, at: float, replicas: Iterable[tuple[int, float, dict[str, float]]]) -> Counts:
        """Add what each (replica, started, counters) has grown by; ``at`` in Unix seconds."""
        if self._since is None:
            self._since = at
        for replica, started, counters in replicas:
            if not counters:
                continue
            known = self._last.get(replica)
            if known is not None and known[0] == started:
                before = known[1]
            else:
                before = {} if known or started > self._since else counters
            self._add(counters, before)
            # The last words of a silent replica may be older than what it had answered.
            most = {path: max(n, before.get(path, n)) for path, n in counters.items()}
            self._last[replica] = (started, most)
        return Counts(self._places, self._values)

    def _add(self, counters: Mapping[str, float], before: Mapping[str, float]) -> None:
        for path, value in counters.items():
            if path not in self._places:
                self._places[path] = len(self._values)
                self._values.append(0.0)
            self._values[self._places[path]] += max(0.0, value - before.get(path, 0.0))
