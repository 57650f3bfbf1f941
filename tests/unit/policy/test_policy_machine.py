"""State machine over the planner and the index: any order of calls, answers and failures."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from policy_model import RANKS, Job
from policy_rules import PolicyRules

from xinference_xavier.policy.plans import LoadPlan


class PolicyMachine(PolicyRules):
    """Ranks answer late and in any order."""

    def issued(self, job: Job, at_once: bool) -> None:
        if at_once:
            job.answers = dict.fromkeys(range(RANKS), True)
            self.model.commit(job)

    @precondition(lambda self: self.model.jobs)
    @rule(
        pick=st.integers(0, 15),
        rank=st.integers(0, RANKS - 1),
        ok=st.sampled_from([True, True, True, False]),
        failed=st.sets(st.integers(0, 23), max_size=3),
    )
    def answer(self, pick, rank, ok, failed):
        """One rank answers one job; the last answer commits it."""
        job = self.model.jobs[pick % len(self.model.jobs)]
        if rank in job.answers:
            rank = RANKS - 1 - rank
        job.answers[rank] = ok
        if isinstance(job.plan, LoadPlan) and not ok:
            job.failed |= {position % len(job.plan.keys) for position in failed}
        if job.done:
            self.model.commit(job)


TestPolicyMachine = PolicyMachine.TestCase
