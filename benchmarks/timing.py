"""What all benchmarks of this folder do with their timings and say of the machine."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence

#: A measurement: does the work once and returns what one unit of it took.
Measure = Callable[[], float]


def alternate(first: Measure, second: Measure, quads: int) -> tuple[list[float], list[float]]:
    """Run two measurements in the order A B B A, ``quads`` times; two samples each per quad.

    So a machine that gets slower or faster meanwhile does so for both.
    """
    a: list[float] = []
    b: list[float] = []
    for _ in range(quads):
        a.append(first())
        b.append(second())
        b.append(second())
        a.append(first())
    return a, b


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Ratio of each quad: the sum of its two samples of one over that of the other."""
    pairs = range(0, len(over) - 1, 2)
    return [sum(over[at : at + 2]) / sum(under[at : at + 2]) for at in pairs]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine() -> str:
    """Cores, memory and load, for a heading."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, load {load:.1f} in the last minute"


def available_bytes() -> int:
    """Memory that can be taken now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
