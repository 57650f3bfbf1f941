"""The CPU copier's queue: loads go first, wherever nobody can tell.

A request waits for a load; nobody waits for a store or a move (a demotion, most often), and one of
those may take a tenth of a second. A load therefore overtakes them, unless it reads a row that one
of them has yet to write, or writes a KV block that one of them has yet to read or write. Among
themselves loads keep their order, and so do all others.
"""

from __future__ import annotations

import threading
from collections import deque

from xinference_xavier.storage.jobs import CopyJob, CopyKind


class JobQueue:
    """Jobs for one thread, put on any."""

    def __init__(self) -> None:
        self._ready = threading.Condition()  # guards everything below
        self._loads: deque[CopyJob] = deque()
        #: Jobs that keep their place, each after all before it.
        self._others: deque[CopyJob] = deque()
        # Of those: how many were put, handed out and ended so far.
        self._put = self._begun = self._ended = 0
        #: Location or KV block -> the number of the last of those that writes or uses it.
        self._rows: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self._closed = False

    def put(self, job: CopyJob) -> None:
        """Add a job."""
        with self._ready:
            if job.kind is CopyKind.LOAD and not self._meets(job):
                self._loads.append(job)
            else:
                self._put += 1
                self._rows.update(dict.fromkeys(job.targets.tolist(), self._put))
                self._blocks.update(dict.fromkeys(job.blocks.tolist(), self._put))
                self._others.append(job)
            self._ready.notify()

    def get(self) -> CopyJob | None:
        """Wait for the next job; None once the queue is closed and empty. The caller has ended
        whatever it was given before."""
        with self._ready:
            self._ended = self._begun
            if self._ended == self._put:
                self._rows.clear()
                self._blocks.clear()
            self._ready.wait_for(lambda: self._loads or self._others or self._closed)
            if self._loads:
                return self._loads.popleft()
            if not self._others:
                return None
            self._begun += 1
            return self._others.popleft()

    def next_load(self) -> CopyJob | None:
        """A load that may run before the current job has ended; None if there is none now."""
        with self._ready:
            return self._loads.popleft() if self._loads else None

    def close(self) -> None:
        """Nothing will be put any more."""
        with self._ready:
            self._closed = True
            self._ready.notify()

    def _meets(self, load: CopyJob) -> bool:
        """Whether a job that has not ended must end before this load."""
        if self._ended == self._put:
            return False
        pairs = ((self._rows, load.sources), (self._blocks, load.blocks))
        return any(
            last.get(index, 0) > self._ended
            for last, indexes in pairs
            for index in indexes.tolist()
        )
