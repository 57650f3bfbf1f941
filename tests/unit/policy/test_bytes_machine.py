"""State machine over the policy and real CPU slabs: what can be read is what was stored.

Each rank runs its jobs in order and lags behind the others as it likes; any copy may fail on any
rank. After every step all readable rows of all ranks are compared with the bytes of their keys.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from policy_model import RANKS, Job
from policy_rank import Rank
from policy_rules import MOST_ROWS, PolicyRules


class BytesMachine(PolicyRules):
    """Plans become copies; the last rank's answer may be committed late."""

    @initialize()
    def start_ranks(self):
        self.ranks: list[Rank] = []
        self.ended: list[Job] = []
        self.job_ids = 0

    def issued(self, job: Job, at_once: bool) -> None:
        if not self.ranks:
            self.ranks = [Rank(n, MOST_ROWS, MOST_ROWS) for n in range(RANKS)]
        self.job_ids += 1
        for rank in self.ranks:
            rank.queue.append((self.job_ids, job))
        while at_once and not job.done:
            for rank in self.ranks:
                if rank.queue:
                    self.run_one(rank)
        if at_once:
            self.ended.remove(job)
            self.model.commit(job)

    @precondition(lambda self: any(rank.queue for rank in self.ranks))
    @rule(
        number=st.integers(0, RANKS - 1),
        jobs=st.integers(1, 3),
        fail=st.sampled_from([False, False, False, True]),
    )
    def run(self, number, jobs, fail):
        """One rank runs the next of its jobs; only the first of them may fail."""
        rank = self.ranks[number]
        for job in range(min(jobs, len(rank.queue))):
            self.run_one(rank, fail and job == 0)

    def run_one(self, rank: Rank, fail: bool = False) -> None:
        job, result = rank.run_next(fail)
        job.answers[rank.number] = result.ok
        job.failed |= set(result.failed.tolist())
        if job.done:
            self.ended.append(job)

    @precondition(lambda self: self.ended)
    @rule(pick=st.integers(0, 7))
    def commit(self, pick):
        self.model.commit(self.ended.pop(pick % len(self.ended)))

    @invariant()
    def bytes_are_right(self):
        for rank in getattr(self, "ranks", ()):
            for key, location in self.model.readable.items():
                rank.check_row(key, location)

    def teardown(self):
        try:
            for rank in getattr(self, "ranks", ()):
                while rank.queue:
                    self.run_one(rank)
            for job in getattr(self, "ended", ()):
                self.model.commit(job)
            self.bytes_are_right()
            super().teardown()
        finally:
            for rank in getattr(self, "ranks", ()):
                rank.close()


TestBytesMachine = BytesMachine.TestCase
TestBytesMachine.settings = settings(max_examples=settings().max_examples // 2)
