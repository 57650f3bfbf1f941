"""What a round's records say: times to first tokens, throughput, gaps.

Pure functions of records as ``client.py`` makes them. Percentiles are numpy's, interpolated between
neighbours. Times are in seconds, throughput in output tokens per second.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]
#: Requests that only prepare or steer are left out of the figures.
MEASURED = ("incoming", "warm16", "warm32")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """None when there are no values."""
    return float(np.percentile(values, percent)) if values else None


def ttft(record: Record) -> float:
    """From sending to the first text."""
    return float(record["chunks"][0] - record["sent"])


def tpot(record: Record) -> float | None:
    """Mean time of each output token after the first chunk; None for answers of one chunk."""
    chunks, tokens = record["chunks"], record["tokens"]
    if len(chunks) < 2 or tokens < 2:
        return None
    return float((chunks[-1] - chunks[0]) / (tokens - 1))


def gaps(records: Sequence[Record], since: float, until: float) -> list[float]:
    """Times between neighbouring chunks of one stream, of those gaps that ended within the window.

    The window is that of the incoming load: before and after it nothing disturbs the streams.
    """
    found: list[float] = []
    for record in records:
        chunks = record["chunks"]
        found += [
            after - before
            for before, after in itertools.pairwise(chunks)
            if since <= after <= until
        ]
    return found


def figures(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Figures of each measured group of a round, by group."""
    streams = [r for r in records if r["group"] == "stream" and r["error"] is None]
    found = {}
    for group in MEASURED:
        asked = [record for record in records if record["group"] == group]
        if asked:
            found[group] = _of_group(asked, streams)
    return found


def failed(records: Sequence[Record]) -> list[str]:
    """What went wrong, with the request's name; steering and preparing requests too."""
    return [f"{r['name']}: {r['error']}" for r in records if r["error"] is not None]


def _of_group(asked: Sequence[Record], streams: Sequence[Record]) -> dict[str, Any]:
    done = [record for record in asked if record["error"] is None]
    first = [ttft(record) for record in done]
    each = [value for record in done if (value := tpot(record)) is not None]
    since = min(record["sent"] for record in asked)
    until = max((record["chunks"][-1] for record in done), default=since)
    paused = gaps(streams, since, until)
    seconds = until - since
    # What the streams said meanwhile counts as well: it is work done in the same time.
    said = sum(since <= moment <= until for r in streams for moment in r["chunks"])
    tokens = sum(record["tokens"] for record in done)
    return {
        "requests": len(asked),
        "failed": len(asked) - len(done),
        "seconds": seconds,
        "ttft_p50": percentile(first, 50),
        "ttft_p95": percentile(first, 95),
        "tpot_p95": percentile(each, 95),
        "tokens_per_second": (tokens + said) / seconds if seconds else None,
        "gap_p99": percentile(paused, 99),
        "gaps": len(paused),
        "ttft": {record["name"]: ttft(record) for record in done},
    }


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Nested counters less those of an earlier reading; what is new since then counts from 0."""
    return {
        key: difference(value, before.get(key, {}))
        if isinstance(value, Mapping)
        else value - before.get(key, 0)
        for key, value in after.items()
    }


def total(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of nested counters over replicas."""
    summed: dict[str, Any] = {}
    for key in {key for reading in readings for key in reading}:
        values = [reading[key] for reading in readings if key in reading]
        if all(isinstance(value, Mapping) for value in values):
            summed[key] = total(values)
        else:
            summed[key] = sum(values)
    return summed
