"""A copier whose jobs run, and are reported, when the test says so.

Wraps a real copier, which copies the bytes. Jobs run in the order of submission, as the contract
has it; results may be held back and reported in another order, as several streams would.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xinference_xavier.storage.copier import Copier, CopyJob, CopyKind, CopyResult
from xinference_xavier.types import NOWHERE

ALL = 10**6


@dataclass
class Gate:
    """How much happens at each poll. Lasting, until changed."""

    #: Jobs executed and results reported per poll.
    run: int = ALL
    report: int = ALL
    #: Reports in random order, where given.
    shuffle: random.Random | None = None
    #: Failures to come, by kind: positions (LOAD) or None for the whole job, in order.
    failures: dict[CopyKind, deque[Collection[int] | None]] = field(
        default_factory=lambda: {kind: deque() for kind in CopyKind}
    )

    def fail(self, kind: CopyKind, positions: Collection[int] | None = None) -> None:
        """Let the next job of ``kind`` fail: wholly, or at ``positions`` (loads)."""
        self.failures[kind].append(positions)

    def open(self) -> None:
        self.run = self.report = ALL
        self.shuffle = None


class GatedCopier:
    """Implements ``Copier``."""

    any_thread = False
    moves_slow_steps = True

    def __init__(self, inner: Copier) -> None:
        self.inner: Any = inner
        self.gate = Gate()
        #: Called with the destination blocks before a load writes them.
        self.scribble: Callable[[Collection[int]], None] = lambda blocks: None
        self.waiting: deque[CopyJob] = deque()
        self.ended: list[CopyResult] = []
        #: Jobs executed, by kind and outcome; blocks loaded, by tier.
        self.done = {(kind, ok): 0 for kind in CopyKind for ok in (True, False)}

    @property
    def mismatches(self) -> int:
        return int(self.inner.mismatches)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.ended)

    def submit(self, job: CopyJob) -> None:
        self.waiting.append(job)

    def poll(self) -> list[CopyResult]:
        for _ in range(min(self.gate.run, len(self.waiting))):
            self._execute(self.waiting.popleft())
        if self.gate.shuffle is not None:
            self.gate.shuffle.shuffle(self.ended)
        reported = self.ended[: self.gate.report]
        del self.ended[: self.gate.report]
        return reported

    def wait(self, job_ids: Collection[int]) -> None:
        while any(job.job_id in job_ids for job in self.waiting):
            self._execute(self.waiting.popleft())

    @property
    def row_check(self) -> Any:
        return self.inner.row_check

    def close(self) -> None:
        self.inner.close()

    def _execute(self, job: CopyJob) -> None:
        if job.kind is CopyKind.LOAD:
            self.scribble(job.blocks.tolist())
        planned = self.gate.failures[job.kind]
        result = self._fail(job, planned.popleft()) if planned else self._copy(job)
        self.done[job.kind, result.ok] += 1
        self.ended.append(result)

    def _copy(self, job: CopyJob) -> CopyResult:
        self.inner.submit(job)
        self.inner.wait({job.job_id})
        (result,) = self.inner.poll()
        return result

    def _fail(self, job: CopyJob, positions: Collection[int] | None) -> CopyResult:
        """Fail for real: a load loses its sources, a write leaves other bytes than it should."""
        if job.kind is CopyKind.LOAD:
            lost = np.arange(len(job)) if positions is None else np.array(sorted(positions))
            sources = job.sources.copy()
            sources[lost[lost < len(job)]] = NOWHERE
            return self._copy(replace(job, sources=sources))
        if job.kind is CopyKind.STORE:
            self._copy(replace(job, blocks=np.roll(job.blocks, 1)))
        else:
            self._copy(replace(job, sources=np.roll(job.sources, 1)))
        return CopyResult.of_failure(job, "planned by the test", 0.0)
