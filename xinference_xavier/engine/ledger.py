"""Jobs in flight, from plan to the last rank's acknowledgement.

Our own record beside vLLM's: it keeps keys in order, knows which ranks failed, and survives
``reset_cache``, which makes vLLM forget jobs whose rows are still being read or written. Runs on
the scheduler thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from xinference_xavier.policy.plans import Plan


@dataclass(slots=True)
class Job:
    """A plan on its way. ``failed`` is None until a rank reports a failure."""

    plan: Plan
    pending_ranks: int
    req_id: str = ""
    failed: frozenset[int] | None = None
    #: When it was opened (``accounts.Accounts.clock``); loads only.
    opened: float = 0.0


class Ledger:
    """Job id to job. vLLM numbers stores and loads from 0 up; moves count down from -1."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Job] = {}
        self._next_move = -1

    def __len__(self) -> int:
        return len(self._jobs)

    def open(self, job_id: int, plan: Plan, req_id: str = "", opened: float = 0.0) -> None:
        self._jobs[job_id] = Job(plan, self._ranks, req_id, opened=opened)

    def open_move(self, plan: Plan) -> int:
        job_id, self._next_move = self._next_move, self._next_move - 1
        self.open(job_id, plan)
        return job_id

    def fail(self, job_id: int, positions: frozenset[int]) -> None:
        """Some rank could not do ``positions`` of the job (none named: the whole of it)."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.failed = (job.failed or frozenset()) | positions

    def acknowledge(self, job_id: int, ranks: int) -> Job | None:
        """``ranks`` more ranks have ended the job; returns it once all have."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        job.pending_ranks -= ranks
        return self._jobs.pop(job_id) if job.pending_ranks <= 0 else None
