"""What stands before one rank's copier: loads that wait for a fetch, moves that wait for loads.

Covers: copying rows as they arrive, holding the load's end back until the fetch has ended, and
failing what did not arrive. Does not cover fetches (``storage/gates.py`` has their outcomes).
``submit``, ``submit_move`` and ``poll`` run on the worker's main thread; rows arrive on the NIXL
thread, and the end of a fetch is told on the tier actor's.

What is copied early may turn out to be void (the lease was lost, the read broke): its KV blocks
belong to the load until its end, which then says that they hold nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from xinference_xavier.storage.copier import Copier, CopyJob, CopyKind, CopyResult
from xinference_xavier.storage.gates import Gates
from xinference_xavier.storage.jobs import Indexes
from xinference_xavier.types import NOWHERE

#: A load waits at most this long, whatever happens to the bridge: longer than any fetch may take.
LONGEST_SECONDS = 60.0

#: A move waits at most this long for loads and their step, lest stores find no room.
MOVE_SECONDS = 0.1


@dataclass(eq=False)
class _Held:
    """A load, and the positions of it that have been given to the copier."""

    job: CopyJob
    fetches: frozenset[int]
    until: float
    #: Positions by the job that copies them; the load's own number copies the last ones.
    pieces: dict[int, Indexes] = field(default_factory=dict)
    results: list[CopyResult] = field(default_factory=list)
    #: Positions whose source did not arrive, known at the end.
    lost: Indexes = field(default_factory=lambda: np.empty(0, np.int64))

    def rest(self) -> Indexes:
        """Positions not given to the copier."""
        given = np.zeros(len(self.job), bool)
        for positions in self.pieces.values():
            given[positions] = True
        return np.flatnonzero(~given)

    @property
    def ended(self) -> bool:
        """Whether the last piece was given, and all have ended."""
        return self.job.job_id in self.pieces and len(self.results) == len(self.pieces)

    def result(self) -> CopyResult:
        """How the load ended, once all its pieces have."""
        broken = [self.pieces[result.job_id][result.failed] for result in self.results]
        failed = np.unique(np.concatenate([self.lost, *broken]))
        errors = [result.error for result in self.results if result.error]
        return CopyResult(
            *(self.job.job_id, self.job.kind, not len(failed)),
            nbytes=sum(result.nbytes for result in self.results),
            seconds=sum(result.seconds for result in self.results),
            failed=failed,
            error=errors[0] if errors else "the fetch failed" if len(failed) else "",
        )


class HeldLoads:
    """Stands before the copier: loads that wait go to it piece by piece, others at once."""

    def __init__(self, copier: Copier, gates: Gates) -> None:
        self._copier = copier
        self._gates = gates
        self._lock = threading.Lock()
        #: Loads whose fetches have not ended.
        self._held: dict[int, _Held] = {}
        #: Pieces in the copier, by number. Those of a load before its last are below zero.
        self._copying: dict[int, _Held] = {}
        self._numbers = itertools.count(-1, -1)
        self._ready: list[_Held] = []
        #: How many loads have not ended, whether they waited or not.
        self._loads = 0
        #: Moves that wait for them, and until when at most.
        self._moves: list[CopyJob] = []
        self._moves_until = 0.0

    def submit(self, job: CopyJob, fetches: frozenset[int]) -> None:
        """Copy ``job``, a load, once ``fetches`` have ended; at once if there are none."""
        self._loads += 1
        if not fetches:
            self._copier.submit(job)
            return
        held = _Held(job, fetches, time.monotonic() + LONGEST_SECONDS)
        with self._lock:
            self._held[job.job_id] = held
        self._gates.when_settled(
            fetches, lambda: self._release(held), lambda locations: self._copy(held, locations)
        )

    def submit_move(self, job: CopyJob) -> None:
        """Copy ``job``. Where moves slow steps, wait for the loads under way and for the step
        after them: it computes what they were awaited for, and its first token is timed."""
        if not self._moves and not (self._loads and self._copier.moves_slow_steps):
            self._copier.submit(job)
            return
        if not self._moves:
            self._moves_until = time.monotonic() + MOVE_SECONDS
        self._moves.append(job)

    def end(self, ended: Mapping[int, frozenset[int] | None]) -> None:
        """Let loads go on that wait for these fetches, if nobody has told of their end yet."""
        for fetch_id, lost in ended.items():
            if not self._gates.is_over(fetch_id):
                self._gates.settle(fetch_id, lost)

    def poll(self) -> list[CopyResult]:
        """What the copier has ended, loads as a whole. Gives it what may go on, and what has
        waited for too long."""
        if self._held or self._ready:
            self._submit_ready()
        results = list(self._merge(self._copier.poll()))
        loads = sum(result.kind is CopyKind.LOAD for result in results)
        self._loads -= loads
        if self._moves:
            self._submit_moves(wait=bool(self._loads or loads))
        return results

    def _submit_moves(self, wait: bool) -> None:
        if wait and time.monotonic() < self._moves_until:
            return
        for job in self._moves:
            self._copier.submit(job)
        self._moves = []

    def _copy(self, held: _Held, locations: Indexes) -> None:
        """Copy what has arrived, if the copier takes jobs from any thread. One group: only then
        is a load told before its bytes are there."""
        if not self._copier.any_thread or len(held.job.group_sizes) != 1:
            return
        with self._lock:
            if (
                held.job.job_id not in self._held
            ):  # its fetches have ended, or it waited for too long
                return
            rest = held.rest()
            positions = rest[np.isin(held.job.sources[rest], locations)]
            if len(positions):
                self._give(held, next(self._numbers), positions, held.job.sources)

    def _release(self, held: _Held) -> None:
        """All bytes are there, or will not come. While a step computes, a copier that takes jobs
        from any thread goes on at once: the load ends with the step, not with the next one."""
        with self._lock:
            if self._held.pop(held.job.job_id, None) is None:  # it waited for too long
                return
            if self._copier.any_thread:
                self._finish(held)
            else:
                self._ready.append(held)

    def _submit_ready(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [held for held in self._held.values() if held.until <= now]
            for held in late:
                del self._held[held.job.job_id]
            for held in self._ready + late:
                self._finish(held)
            self._ready = []

    def _finish(self, held: _Held) -> None:
        """Give the copier what it has not got, even if that is nothing: it ends after the rest."""
        lost, sources = self._gates.lost(held.fetches), held.job.sources
        if lost is None:
            held.lost = np.arange(len(held.job))
        elif lost:
            gone = np.isin(sources, np.fromiter(lost, np.int64, len(lost)))
            held.lost = np.flatnonzero(gone)
        sources = sources.copy()
        sources[held.lost] = NOWHERE
        self._give(held, held.job.job_id, held.rest(), sources)

    def _give(self, held: _Held, number: int, positions: Indexes, sources: Indexes) -> None:
        held.pieces[number] = positions
        self._copying[number] = held
        job, sizes = held.job, held.job.group_sizes
        if len(positions) != len(job):
            sizes = (len(positions),)
        blocks, sources = job.blocks[positions], sources[positions]
        piece = replace(job, job_id=number, group_sizes=sizes, blocks=blocks, sources=sources)
        self._copier.submit(piece)

    def _merge(self, results: Iterable[CopyResult]) -> Iterable[CopyResult]:
        """One result for each load, once all its pieces have ended."""
        for result in results:
            with self._lock:
                held = self._copying.pop(result.job_id, None)
            if held is None:
                yield result
                continue
            held.results.append(result)
            if held.ended:
                yield held.result()
