"""Rules for state machines over the planner: requests that store, load and end, moves, clears.

Who runs the jobs, and when they end, is up to the subclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_model import Job, PolicyModel, ReferenceOrder, key_of

from xinference_xavier.policy.order import LRUOrder
from xinference_xavier.policy.reuse import ReuseOrder
from xinference_xavier.types import Tier

POSITIONS = 8
#: The most that a tier is resized to.
MOST_ROWS = 12
PROMPT = st.integers(0, 3)
#: One of the running requests, or a new one; about three run at a time.
PICK = st.integers(0, 3)


@dataclass
class Request:
    """One running request: which prompt, how much of it was offered for storing."""

    mark: int
    prompt: int
    offered: int = 0
    broken: set[int] = field(default_factory=set)


class PolicyRules(RuleBasedStateMachine):
    """Requests come, store in chunks, load and end while ranks are slow to answer."""

    @initialize(
        gpu_rows=st.integers(0, 8),
        cpu_rows=st.integers(0, 8),
        low_water=st.integers(0, 4),
        groups=st.integers(1, 3),
        windows=st.sets(st.integers(0, 2)),
        order=st.sampled_from([LRUOrder, ReferenceOrder, ReuseOrder]),
    )
    def start(self, gpu_rows, cpu_rows, low_water, groups, windows, order):
        self.model = PolicyModel(gpu_rows, cpu_rows, min(low_water, gpu_rows), order, windows)
        self.groups = groups
        self.requests: list[Request] = []
        self.stored_now: set[int] = set()
        self.marks = 0

    def request(self, pick: int, prompt: int) -> Request:
        """A running request, or a new one for ``prompt``."""
        if pick < len(self.requests):
            return self.requests[pick]
        self.marks += 1
        self.requests.append(Request(self.marks, prompt))
        return self.requests[-1]

    def keys(self, prompt: int, start: int, stop: int) -> list[bytes]:
        return [key_of(prompt, p, g) for g in range(self.groups) for p in range(start, stop)]

    def issued(self, job: Job, at_once: bool) -> None:
        """A job was handed to the ranks; ``at_once`` if all is well and it ends before others."""
        raise NotImplementedError

    @rule(pick=PICK, prompt=PROMPT, blocks=st.integers(1, POSITIONS), at_once=st.booleans())
    def store(self, pick, prompt, blocks, at_once):
        request = self.request(pick, prompt)
        stop = min(request.offered + blocks, POSITIONS)
        keys = self.keys(request.prompt, request.offered, stop)
        request.offered = stop
        self.stored_now.add(request.mark)
        job = self.model.admit(keys, request.mark, request.broken)
        if job in self.model.jobs:
            self.issued(job, at_once)

    @rule(
        pick=PICK,
        prompt=PROMPT,
        start=st.sampled_from([0, 0, 1, 3]),
        blocks=st.integers(1, POSITIONS),
        at_once=st.booleans(),
    )
    def load(self, pick, prompt, start, blocks, at_once):
        request = self.request(pick, prompt)
        keys = self.keys(request.prompt, start, min(start + blocks, POSITIONS))
        self.issued(self.model.load(keys, request.mark), at_once)

    @rule(shield=st.booleans(), at_once=st.booleans())
    def moves(self, shield, at_once):
        for job in self.model.plan_moves(self.stored_now if shield else ()):
            self.issued(job, at_once)
        self.stored_now.clear()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 3))
    def end(self, pick):
        request = self.requests.pop(pick % len(self.requests))
        self.model.planner.retire(self.keys(request.prompt, 0, POSITIONS), request.mark)

    @rule(really=st.sampled_from([False, False, True]))
    def clear(self, really):
        if really:
            self.model.clear()

    @rule(tier=st.sampled_from([Tier.GPU, Tier.CPU]), rows=st.integers(0, MOST_ROWS))
    def resize(self, tier, rows):
        self.model.resize(tier, rows)

    @rule(paused=st.sampled_from([True, False, False]))
    def pause(self, paused):
        self.model.planner.paused = paused

    @invariant()
    def holds(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.drain()
            self.model.clear()
            assert not len(self.model.index)
            for tier in (self.model.index.gpu, self.model.index.cpu):
                assert tier.free == tier.rows
