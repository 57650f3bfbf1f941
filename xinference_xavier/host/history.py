"""One model's past: points small enough to keep for an hour.

Plain data and pure functions of what ``view.py`` gathered. Used on the event loop of Xinference's
API process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from xinference_xavier.host.counters import Counts, Growth, counters_of
from xinference_xavier.host.summary import ModelNumbers, rates, summarize
from xinference_xavier.host.view import ModelView

#: Most points kept of a model.
MOST_POINTS = 1800
#: Rates look back this long, over at least one interval.
RATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything the replicas said at one time: Unix seconds, and seconds of the monotonic
    clock."""

    at: float
    monotonic: float
    models: list[ModelView]


@dataclass(frozen=True, slots=True)
class Point:
    """One model at one time, small enough to be kept."""

    at: float
    monotonic: float
    numbers: ModelNumbers
    #: What its counters have grown by since the model was first seen; never falls.
    grown: Counts


class Past:
    """One model's points, the oldest first."""

    def __init__(self) -> None:
        self.growth = Growth()
        self.points: deque[Point] = deque(maxlen=MOST_POINTS)

    def add(self, sample: Sample, model: ModelView) -> None:
        told = ((r.replica, r.started, counters_of(r.stats)) for r in model.replicas)
        grown = self.growth.note(sample.at, told)
        point = Point(sample.at, sample.monotonic, summarize(model), grown)
        earlier = self._earlier(sample.monotonic)
        if earlier is not None:
            recent = rates(earlier.grown, grown, point.monotonic - earlier.monotonic)
            point = replace(point, numbers=replace(point.numbers, rates=recent))
        self.points.append(point)

    def _earlier(self, now: float) -> Point | None:
        """The newest point that is at least ``RATE_SECONDS`` old, else the oldest."""
        found = None
        for point in reversed(self.points):
            found = point
            if now - point.monotonic >= RATE_SECONDS:
                break
        return found
