"""Exceptions of the cache that nobody sees otherwise: counted by reason, logged once per burst.

For places where the cache catches whatever comes, so that requests go on. One count per process: an
engine's is shown with its replica's statistics. Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def note(logger: logging.Logger, reason: str, text: str, *, level: int = logging.WARNING) -> None:
    """Count the exception that is being handled; log ``text`` with it at the 1st, 2nd, 4th, 8th
    ... of ``reason``, a metric label."""
    with _lock:
        _counts[reason] += 1
        count = _counts[reason]
    if count.bit_count() == 1:
        logger.log(level, "xavier: %s (%d so far)", text, count, exc_info=True)


def counts() -> dict[str, int]:
    """Exceptions of this process so far, by reason."""
    with _lock:
        return dict(_counts)
