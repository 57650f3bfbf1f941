"""Loads that wait for a fetch: what of each fetch of a rank has arrived, and how it ended.

Covers: remembering outcomes, calling back. Does not cover the fetch (``transport``) or the load
(``copier``). Rows arrive on the NIXL thread, outcomes on the tier actor's, questions come from the
worker's main thread; nobody waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from xinference_xavier.storage.jobs import Indexes

#: Outcomes remembered. A load that asks about an older fetch is told that nothing arrived.
REMEMBERED = 4096

#: Locations whose bytes did not arrive; None stands for all of them.
Lost = frozenset[int] | None
Waiter = Callable[[], None]
#: Told of locations, int64 ``[n]``, whose bytes are there; whether they count is known at the end.
Progress = Callable[[Indexes], None]


@dataclass(eq=False)
class _Waiting:
    pending: set[int]
    waiter: Waiter
    progress: Progress


class Gates:
    """Outcomes of fetches by number, which count up from 1."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[int, Lost] = OrderedDict()
        #: What has arrived of fetches under way.
        self._arrived: dict[int, list[Indexes]] = {}
        self._waiting: list[_Waiting] = []
        self._forgotten = 0

    def arrive(self, fetch_id: int, locations: Indexes) -> None:
        """Bytes are there. Calls those who wait for the fetch, on this thread."""
        with self._lock:
            if self._known(fetch_id):
                return
            self._arrived.setdefault(fetch_id, []).append(locations)
            interested = [entry for entry in self._waiting if fetch_id in entry.pending]
        for entry in interested:
            entry.progress(locations)

    def settle(self, fetch_id: int, lost: Lost) -> None:
        """The fetch has ended. Calls those who waited for it last, on this thread."""
        with self._lock:
            self._arrived.pop(fetch_id, None)
            self._outcomes[fetch_id] = lost
            while len(self._outcomes) > REMEMBERED:
                oldest, _ = self._outcomes.popitem(last=False)
                self._forgotten = max(self._forgotten, oldest)
            for entry in self._waiting:
                entry.pending.discard(fetch_id)
            ready = [entry for entry in self._waiting if not entry.pending]
            self._waiting = [entry for entry in self._waiting if entry.pending]
        for entry in ready:
            entry.waiter()

    def when_settled(
        self,
        fetch_ids: Collection[int],
        waiter: Waiter,
        progress: Progress = lambda locations: None,
    ) -> None:
        """Call ``waiter`` once all have ended: at once on this thread if they have. Until then
        ``progress`` is told of what arrives, and now of what has arrived; a location may be told
        twice."""
        with self._lock:
            pending = {i for i in fetch_ids if not self._known(i)}
            arrived = self._arrived_of(pending)
            if pending:
                self._waiting.append(_Waiting(pending, waiter, progress))
        for locations in arrived:
            progress(locations)
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

    def _arrived_of(self, fetch_ids: Iterable[int]) -> list[Indexes]:
        return [part for fetch_id in fetch_ids for part in self._arrived.get(fetch_id, ())]
