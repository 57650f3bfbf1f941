"""Numbers as people read them. Pure functions."""

from __future__ import annotations

import math
from datetime import datetime, timezone

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def count_text(number: float) -> str:
    """``12,345``; two digits after the point for what is small and no whole number."""
    if number == int(number) or abs(number) >= 100:
        return f"{round(number):,}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def bytes_text(number: float) -> str:
    """``1.5 GiB``: units of 1024, as budgets are given."""
    value, unit = float(number), 0
    while abs(value) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value == int(value) else 1
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def byte_rate_text(number: float) -> str:
    """``1.5 GiB/s``."""
    return f"{bytes_text(number)}/s"


def seconds_text(number: float) -> str:
    """``12.3 s``, ``4.5 min``, ``2.0 h``."""
    size = abs(number)
    if size >= 7200:
        return f"{number / 3600:,.1f} h"
    return f"{number / 60:.1f} min" if size >= 120 else f"{number:.1f} s"


def window_text(seconds: float) -> str:
    """``5 minutes``, ``1 hour``."""
    number, unit = (seconds / 3600, "hour") if seconds >= 3600 else (seconds / 60, "minute")
    return f"{number:g} {unit}{'' if number == 1 else 's'}"


def clock_text(at: float) -> str:
    """Time of day in UTC, of Unix seconds."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%H:%M:%S")


def round_up(number: float) -> float:
    """Where an axis in four parts ends: the next 1, 2, 4 or 8 times a power of ten."""
    if number <= 0:
        return 4.0
    power = 10.0 ** math.floor(math.log10(number))
    return float(next(step * power for step in (1, 2, 4, 8, 10) if number <= step * power))


def round_up_bytes(number: float) -> float:
    """The same for bytes: the next power of two."""
    return 4.0 if number <= 4 else 2.0 ** math.ceil(math.log2(number))
