"""Loads that wait for a fetch: how each fetch of a rank ended, and who wants to know.

Covers: remembering outcomes, calling back. Does not cover the fetch (``transport``) or the load
(``copier``). Outcomes come from the tier actor's thread, questions from the worker's main thread;
nobody waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection

#: Outcomes remembered. A load that asks about an older fetch is told that nothing arrived.
REMEMBERED = 4096

#: Locations whose bytes did not arrive; None stands for all of them.
Lost = frozenset[int] | None
Waiter = Callable[[], None]


class Gates:
    """Outcomes of fetches by number, which count up from 1."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[int, Lost] = OrderedDict()
        self._waiters: list[tuple[set[int], Waiter]] = []
        self._forgotten = 0

    def settle(self, fetch_id: int, lost: Lost) -> None:
        """The fetch has ended. Calls those who waited for it last, on this thread."""
        with self._lock:
            self._outcomes[fetch_id] = lost
            while len(self._outcomes) > REMEMBERED:
                oldest, _ = self._outcomes.popitem(last=False)
                self._forgotten = max(self._forgotten, oldest)
            for pending, _ in self._waiters:
                pending.discard(fetch_id)
            ready = [waiter for pending, waiter in self._waiters if not pending]
            self._waiters = [entry for entry in self._waiters if entry[0]]
        for waiter in ready:
            waiter()

    def when_settled(self, fetch_ids: Collection[int], waiter: Waiter) -> None:
        """Call ``waiter`` once all have ended: at once on this thread if they have."""
        with self._lock:
            pending = {i for i in fetch_ids if not self._known(i)}
            if pending:
                self._waiters.append((pending, waiter))
        if not pending:
            waiter()

    def lost(self, fetch_ids: Collection[int]) -> Lost:
        """What did not arrive of fetches that have ended; one still under way is lost whole."""
        found: set[int] = set()
        with self._lock:
            for fetch_id in fetch_ids:
                lost = self._outcomes.get(fetch_id)
                if lost is None:  # all of it, or not known any more
                    return None
                found |= lost
        return frozenset(found)

    def is_over(self, fetch_id: int) -> bool:
        """Whether the fetch has ended."""
        with self._lock:
            return self._known(fetch_id)

    def _known(self, fetch_id: int) -> bool:
        return fetch_id in self._outcomes or fetch_id <= self._forgotten
