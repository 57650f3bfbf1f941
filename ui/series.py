"""The four plots: their series, and the sentence and table that say the same.

Pure functions of a model's history. How a plot looks is ``charts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xinference_xavier.host.sampler import Point
from xinference_xavier.host.summary import ModelNumbers

from .data import Table, Window, newest
from .units import byte_rate_text, clock_text, count_text, window_text

#: Most rows of a plot's table.
MOST_ROWS = 20


@dataclass(frozen=True)
class Series:
    """One line. ``style`` is its number among the colours and dashes, the same in every plot."""

    name: str
    style: int
    values: list[float | None]

    @property
    def last(self) -> float | None:
        """The newest value there is."""
        return next((value for value in reversed(self.values) if value is not None), None)

    @property
    def peak(self) -> float:
        return max((value for value in self.values if value is not None), default=0.0)


@dataclass(frozen=True)
class Plot:
    """``times`` in Unix seconds, one for each value of every series; ``text`` writes a value."""

    key: str
    title: str
    unit: str
    times: list[float]
    series: list[Series]
    text: Callable[[float], str]
    summary: str

    def table(self) -> Table:
        """The same numbers, thinned to ``MOST_ROWS`` and the newest first."""
        step = max(1, -(-len(self.times) // MOST_ROWS))
        numbers = range(len(self.times) - 1, -1, -step)
        rows = [
            (clock_text(self.times[n]), *(_cell(self.text, line.values[n]) for line in self.series))
            for n in numbers
            if any(line.values[n] is not None for line in self.series)
        ]
        columns = ("time (UTC)", *(line.name for line in self.series))
        return Table(f"{self.title}, in {self.unit}", columns, rows)


@dataclass(frozen=True)
class _Line:
    name: str
    style: int
    value: Callable[[ModelNumbers], float | None]


GPU, CPU, PEER, OTHER = range(4)


def _rate(read: Callable[..., float]) -> Callable[[ModelNumbers], float | None]:
    return lambda numbers: None if numbers.rates is None else read(numbers.rates)


_SNAPSHOTS = (
    _Line("GPU", GPU, lambda numbers: numbers.gpu.snapshots),
    _Line("CPU", CPU, lambda numbers: numbers.cpu.snapshots),
)
_MOVES = (
    _Line("demotions", GPU, _rate(lambda rates: rates.demotions_per_minute)),
    _Line("promotions", PEER, _rate(lambda rates: rates.promotions_per_minute)),
    _Line("evictions", CPU, _rate(lambda rates: rates.evictions_per_minute)),
)
_HITS = (
    _Line("GPU", GPU, _rate(lambda rates: rates.hit_tokens_per_second["gpu"])),
    _Line("CPU", CPU, _rate(lambda rates: rates.hit_tokens_per_second["cpu"])),
    _Line("peer", PEER, _rate(lambda rates: rates.hit_tokens_per_second["peer"])),
    _Line("computed", OTHER, _rate(lambda rates: rates.computed_tokens_per_second)),
)
_TRANSFERS = (
    _Line("store", GPU, _rate(lambda rates: rates.transfer_bytes_per_second["store"])),
    _Line("demote, promote", CPU, _rate(lambda rates: rates.transfer_bytes_per_second["move"])),
    _Line("peer reads", PEER, _rate(lambda rates: rates.transfer_bytes_per_second["fetch"])),
    _Line("load", OTHER, _rate(lambda rates: rates.transfer_bytes_per_second["load"])),
)


def plots(points: Sequence[Point], window: Window) -> list[Plot]:
    """Snapshots by tier, moves, tokens by source, and transfers, over ``window``."""
    shown = [point for point in points if point.at > window.end - window.seconds]
    last = shown[-1].numbers if shown else None

    def plot(
        key: str,
        title: str,
        unit: str,
        lines: Sequence[_Line],
        text: Callable[[float], str] = count_text,
    ) -> Plot:
        pick = newest if key == "snapshots" else max
        series = [Series(x.name, x.style, window.thin(shown, x.value, pick)) for x in lines]
        said = _levels(series, last, window) if key == "snapshots" else ""
        said = said or _peaks(title, unit, series, text, window)
        return Plot(key, title, unit, window.times(), series, text, said)

    return [
        plot("snapshots", "Snapshots by tier", "snapshots", _SNAPSHOTS),
        plot("moves", "Demotions, promotions and evictions", "snapshots per minute", _MOVES),
        plot("hits", "Prompt tokens by source", "tokens per second", _HITS),
        plot("transfers", "Transfer rates", "bytes per second", _TRANSFERS, byte_rate_text),
    ]


def _levels(series: Sequence[Series], last: ModelNumbers | None, window: Window) -> str:
    """Where each tier stood at both ends of the window."""
    if last is None:
        return ""
    said = []
    for line, rows in zip(series, (last.gpu.rows, last.cpu.rows), strict=True):
        first = next(value for value in line.values if value is not None)
        change = f"went from {count_text(first)} to" if first != line.last else "stayed at"
        said.append(f"{line.name} {change} {count_text(line.last or 0)} of {count_text(rows)}")
    return f"In the last {window_text(window.seconds)}, {' and '.join(said)} snapshots."


def _peaks(
    title: str, unit: str, series: Sequence[Series], text: Callable[[float], str], window: Window
) -> str:
    """Now and at most, for each series that did anything."""
    span = f"the last {window_text(window.seconds)}"
    if all(line.last is None for line in series):
        return f"No samples of {span} yet."
    busy = [line for line in series if line.peak > 0]
    if not busy:
        return f"{title}: none in {span}."
    scale = "" if unit.startswith("bytes") else f" {unit}"
    said = ", ".join(
        f"{line.name} {text(line.last or 0)} now and {text(line.peak)} at most" for line in busy
    )
    idle = [line.name for line in series if line.peak <= 0]
    rest = f"; none for {', '.join(idle)}" if idle else ""
    return f"In {span}{f', in{scale}' if scale else ''}: {said}{rest}."


def _cell(text: Callable[[float], str], value: float | None) -> str:
    return "–" if value is None else text(value)
