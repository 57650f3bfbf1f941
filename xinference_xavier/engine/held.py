"""Loads that wait for a fetch, in one rank.

Covers: holding a load back until the bytes of its rows are there, and failing what did not arrive.
Does not cover fetches (``storage/gates.py`` has their outcomes). ``submit`` and ``poll`` run on the
worker's main thread; the end of a fetch is told on the tier actor's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from xinference_xavier.storage.copier import Copier, CopyJob
from xinference_xavier.storage.gates import Gates
from xinference_xavier.types import NOWHERE

#: A load waits at most this long, whatever happens to the bridge: longer than any fetch may take.
LONGEST_SECONDS = 60.0


@dataclass(eq=False)
class _Held:
    job: CopyJob
    fetches: frozenset[int]
    until: float


class HeldLoads:
    """Hands loads to the copier when their fetches have ended."""

    def __init__(self, copier: Copier, gates: Gates) -> None:
        self._copier = copier
        self._gates = gates
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._ready: list[_Held] = []

    def submit(self, job: CopyJob, fetches: frozenset[int]) -> None:
        """Copy ``job`` once ``fetches`` have ended; at once if there are none."""
        if not fetches:
            self._copier.submit(job)
            return
        held = _Held(job, fetches, time.monotonic() + LONGEST_SECONDS)
        with self._lock:
            self._held[job.job_id] = held
        self._gates.when_settled(fetches, lambda: self._release(held))

    def end(self, ended: Mapping[int, frozenset[int] | None]) -> None:
        """Let loads go on that wait for these fetches, if nobody has told of their end yet."""
        for fetch_id, lost in ended.items():
            if not self._gates.is_over(fetch_id):
                self._gates.settle(fetch_id, lost)

    def poll(self) -> None:
        """Submit what may go on, and what has waited for too long."""
        if not self._held and not self._ready:
            return
        now = time.monotonic()
        with self._lock:
            late = [held for held in self._held.values() if held.until <= now]
            for held in late:
                del self._held[held.job.job_id]
            ready, self._ready = self._ready + late, []
        for held in ready:
            self._submit(held)

    def _release(self, held: _Held) -> None:
        """The bytes are there, or will not come. While a step computes, a copier that takes jobs
        from any thread begins at once: the load ends with the step, not with the next one."""
        with self._lock:
            if self._held.pop(held.job.job_id, None) is None:  # it waited for too long
                return
            if not self._copier.any_thread:
                self._ready.append(held)
                return
        self._submit(held)

    def _submit(self, held: _Held) -> None:
        self._copier.submit(_without(held.job, self._gates.lost(held.fetches)))


def _without(job: CopyJob, lost: frozenset[int] | None) -> CopyJob:
    """The job with lost sources failing; None stands for every source."""
    if lost is None:
        return replace(job, sources=np.full_like(job.sources, NOWHERE))
    if not lost:
        return job
    gone = np.isin(job.sources, np.fromiter(lost, np.int64, len(lost)))
    return replace(job, sources=np.where(gone, NOWHERE, job.sources))
