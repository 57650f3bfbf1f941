"""A plot as one SVG, drawn on the server: no library, no script, nothing from elsewhere.

Colours and dashes are classes of ``static/panel.css``, so that light and dark are one drawing.
Every line has its own colour, dash and marker, and its name in the legend. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .series import Plot, Series
from .units import clock_text, round_up, round_up_bytes

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 100, 16, 12, 28
_TICKS = 4

#: Markers at the newest value, by style: circle, square, triangle, diamond.
_MARKERS = (
    '<circle class="x-mark" r="4.5" cx="{x}" cy="{y}"/>',
    '<rect class="x-mark" x="-4" y="-4" width="8" height="8" transform="translate({x} {y})"/>',
    '<path class="x-mark" d="M0-5 5 4-5 4Z" transform="translate({x} {y})"/>',
    '<path class="x-mark" d="M0-6 6 0 0 6-6 0Z" transform="translate({x} {y})"/>',
)


def chart(plot: Plot) -> str:
    """The drawing, described for those who do not see it by the plot's own sentence."""
    top = _top(plot)
    lines = "".join(_line(line, top) for line in plot.series)
    name = f"x-{plot.key}"
    return (
        f'<svg class="x-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(plot.title)}</title>'
        f'<desc id="{name}-d">{escape(plot.summary)}</desc>{_axes(plot, top)}{lines}</svg>'
    )


def legend(plot: Plot) -> str:
    """Each line's look, name and newest value."""
    items = "".join(
        f'<li class="x-s{line.style}"><svg viewBox="0 0 36 14" width="36" height="14" '
        f'aria-hidden="true"><path class="x-line" d="M1 7H35"/>'
        f"{_MARKERS[line.style].format(x=18, y=7)}</svg>{escape(line.name)}"
        f"<b>{'–' if line.last is None else escape(plot.text(line.last))}</b></li>"
        for line in plot.series
    )
    return f'<ul class="x-legend">{items}</ul>'


def segments(values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    """Runs of (place, value) without a gap."""
    run: list[tuple[int, float]] = []
    for place, value in enumerate(values):
        if value is not None:
            run.append((place, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _top(plot: Plot) -> float:
    """Where the axis of values ends. Levels and rates both begin at 0."""
    peak = max((line.peak for line in plot.series), default=0.0)
    return round_up_bytes(peak) if plot.unit.startswith("bytes") else round_up(peak)


def _line(line: Series, top: float) -> str:
    count = len(line.values)
    runs = [
        [(_x(place, count), _y(value, top)) for place, value in run]
        for run in segments(line.values)
    ]
    # A run of one point has no length; a round line cap shows it as a dot.
    paths = ["M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*run, run[-1]]) for run in runs]
    if not runs:
        return ""
    x, y = runs[-1][-1]
    mark = _MARKERS[line.style].format(x=f"{x:.1f}", y=f"{y:.1f}")
    return f'<g class="x-s{line.style}"><path class="x-line" d="{"".join(paths)}"/>{mark}</g>'


def _axes(plot: Plot, top: float) -> str:
    parts = []
    for number in range(_TICKS + 1):
        value = top * number / _TICKS
        y = _y(value, top)
        parts.append(f'<path class="x-grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="x-tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(plot.text(value))}</text>"
        )
    count = len(plot.times)
    for place, anchor in ((0, "start"), (count // 2, "middle"), (count - 1, "end")):
        parts.append(
            f'<text class="x-tick" x="{_x(place, count):.1f}" y="{HEIGHT - 8}" '
            f'text-anchor="{anchor}">{clock_text(plot.times[place])}</text>'
        )
    return "".join(parts)


def _x(place: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * place / max(1, count - 1)


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)
