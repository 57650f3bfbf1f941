"""State machine over two replicas with leases: a reader gets right bytes of the other, or a miss.

The owner stores, evicts, moves, clears and lends; a row is modelled by the key whose bytes it has.
The reader reserves rows, copies what they hold then, late or in part, and commits by the verdict.
After every step each readable row of both holds the bytes of its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_cache import prompt

from xinference_xavier.policy.columns import LEAVING, READY
from xinference_xavier.policy.index import Found, SnapshotIndex
from xinference_xavier.policy.leases import NOT_NOW, Leases
from xinference_xavier.policy.planner import Planner
from xinference_xavier.policy.plans import FetchPlan, LoadPlan, MovePlan, StorePlan
from xinference_xavier.types import row_of

PROMPTS, BLOCKS, TTL = 12, 4, 10
numbers = st.integers(0, PROMPTS - 1)
picks = st.integers(0, 31)


class Replica:
    """A planner, and the key whose bytes each row holds (b"": garbage)."""

    def __init__(self, gpu: int, cpu: int) -> None:
        self.index = SnapshotIndex(gpu, cpu)
        self.planner = Planner(self.index, low_water=min(1, gpu))
        self.leases = Leases(self.index)
        self.rows: dict[int, bytes] = {}
        self.jobs: list[StorePlan | MovePlan | LoadPlan] = []
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def store(self, keys: list[bytes], at_once: bool) -> None:
        plan = self.planner.admit(keys, self.mark(), set())
        if plan.keys:
            self.jobs.append(plan)
            if at_once:
                self.end(plan, True)

    def end(self, job: StorePlan | MovePlan | LoadPlan, ok: bool) -> None:
        """A job's bytes move, all at once, when it ends: rows in flight belong to it alone."""
        self.jobs.remove(job)
        if isinstance(job, LoadPlan):
            self.planner.finish_load(job, () if ok else (0,))
        elif isinstance(job, StorePlan):
            for key, location in zip(job.keys, job.locations, strict=True):
                self.rows[location] = key if ok else b""
            self.planner.commit_store(job, ok)
        else:
            held = [self.rows.get(source, b"") for source in job.sources]
            for target, content in zip(job.targets, held, strict=True):
                self.rows[target] = content if ok else b""
            self.planner.commit_move(job, ok)

    def check(self) -> None:
        self.index.validate()
        for key in tuple(self.index.keys()):
            location = self.index.where(key)
            if self.index.rows_at(location).state[row_of(location)] in (READY, LEAVING):
                assert self.rows.get(location) == key, "a readable row holds other bytes"


@dataclass(eq=False)
class Fetch:
    """A fetch of the reader's, under a lease of the owner's."""

    plan: FetchPlan
    lease_id: int
    found: list[int]
    unread: set[int] = field(default_factory=set)


class LeaseMachine(RuleBasedStateMachine):
    @initialize(rows=st.tuples(*[st.integers(2, 6)] * 2, *[st.integers(4, 10)] * 2))
    def start(self, rows):
        self.owner, self.reader = Replica(*rows[:2]), Replica(*rows[2:])
        self.replicas = (self.owner, self.reader)
        self.now = 0
        self.fetches: list[Fetch] = []
        #: Reads that timed out: what they still write, and when it is over.
        self.late: list[Fetch] = []

    # -- both ----------------------------------------------------------------------------------

    @rule(
        side=st.integers(0, 1),
        number=numbers,
        blocks=st.integers(1, BLOCKS),
        at_once=st.booleans(),
    )
    def store(self, side, number, blocks, at_once):
        # What the reader has by itself it does not fetch.
        number += 100 * side * (number % 4 > 0)
        self.replicas[side].store(prompt(number, blocks), at_once)

    @rule(side=st.integers(0, 1), number=numbers)
    def load(self, side, number):
        replica = self.replicas[side]
        keys = [k for k in prompt(number, BLOCKS) if replica.index.lookup(k) is Found.HIT]
        if keys:
            replica.jobs.append(replica.planner.pin_for_load(keys, replica.mark()))

    @rule(side=st.integers(0, 1))
    def move(self, side):
        self.replicas[side].jobs += self.replicas[side].planner.plan_moves()

    @rule(side=st.integers(0, 1), pick=picks, ok=st.sampled_from([True, True, True, False]))
    def end(self, side, pick, ok):
        jobs = self.replicas[side].jobs
        if jobs:
            self.replicas[side].end(jobs[pick % len(jobs)], ok)

    @rule(side=st.integers(0, 1), really=st.sampled_from([False, False, False, True]))
    def clear(self, side, really):
        if really:
            self.replicas[side].planner.clear()

    @rule(number=numbers)
    def doubt(self, number):
        """Somebody read other bytes of the owner's than were stored."""
        self.owner.planner.drop(prompt(number, 1))

    # -- leases and fetches --------------------------------------------------------------------

    @rule(number=numbers, there=st.booleans(), late=st.booleans(), at_once=st.booleans())
    def begin(self, number, there, late, at_once):
        """The reader believes that the owner has the whole prompt, and may be right."""
        if there:
            self.owner.store(prompt(number, BLOCKS), at_once=True)
        plan = self.reader.planner.plan_fetch(prompt(number, BLOCKS), self.reader.mark())
        if plan is None:
            return
        lease_id = self.owner.leases.open("reader", self.now, TTL)
        found = self.owner.leases.extend(lease_id, plan.keys)
        granted = {i for i, location in enumerate(found) if location > NOT_NOW}
        for i in granted:
            assert self.owner.rows[found[i]] == plan.keys[i]
        fetch = Fetch(plan, lease_id, found, granted)
        self.fetches.append(fetch)
        if late:  # the owner goes on before the first byte is read
            self.wait(TTL, True)
        if at_once:
            self.copy(fetch, BLOCKS)

    def copy(self, fetch: Fetch, count: int) -> None:
        """Read what the owner's rows hold now, whatever that is."""
        for i in sorted(fetch.unread)[:count]:
            content = self.owner.rows.get(fetch.found[i], b"")
            self.reader.rows[fetch.plan.locations[i]] = content
            fetch.unread.discard(i)

    @precondition(lambda self: self.fetches)
    @rule(pick=picks, count=st.integers(1, BLOCKS))
    def read(self, pick, count):
        self.copy(self.fetches[pick % len(self.fetches)], count)

    @precondition(lambda self: self.fetches)
    @rule(pick=picks, answered=st.sampled_from([True, True, False]), kept=st.booleans())
    def verdict(self, pick, answered, kept):
        """The lease is released, unless the owner does not answer; then nothing counts."""
        fetch = self.fetches.pop(pick % len(self.fetches))
        self.owner.leases.expire(self.now)
        held = self.owner.leases.release(fetch.lease_id) if answered else False
        timed_out = bool(fetch.unread)
        failed = [i for i, location in enumerate(fetch.found) if location <= NOT_NOW]
        if timed_out or not held:
            failed = list(range(len(fetch.found)))
        if not kept:
            self.reader.planner.fetches.release(fetch.plan.fetch_id)
        self.reader.planner.fetches.commit(fetch.plan.fetch_id, failed, timed_out)
        self.reader.planner.fetches.release(fetch.plan.fetch_id)
        if timed_out:
            self.late.append(fetch)

    @precondition(lambda self: self.late)
    @rule(pick=picks, meanwhile=st.booleans())
    def land(self, pick, meanwhile):
        """Bytes of a read that timed out arrive, and nothing more can. The reader may have stored
        as much as it has room for."""
        fetch = self.late.pop(pick % len(self.late))
        for number in range(2 * PROMPTS, 2 * PROMPTS + 4) if meanwhile else ():
            self.reader.store(prompt(number, BLOCKS), at_once=True)
        self.copy(fetch, BLOCKS)
        self.reader.planner.fetches.settle(fetch.plan.fetch_id)

    @rule(seconds=st.sampled_from([1, TTL]), others=st.booleans())
    def wait(self, seconds, others):
        """Leases may end, and what they kept may be overwritten at once."""
        self.now += seconds
        self.owner.leases.expire(self.now)
        for number in range(PROMPTS, PROMPTS + 4) if others else ():
            self.owner.store(prompt(number, BLOCKS), at_once=True)

    # -- what holds ----------------------------------------------------------------------------

    @invariant()
    def bytes_are_right(self):
        for replica in getattr(self, "replicas", ()):
            replica.check()

    def teardown(self):
        if not hasattr(self, "replicas"):
            return
        while self.fetches:
            self.verdict(0, False, True)
        while self.late:
            self.land(0, meanwhile=False)
        self.wait(TTL, False)
        assert (len(self.owner.leases), self.owner.leases.rows) == (0, 0)
        for replica in self.replicas:
            while replica.jobs:
                replica.end(replica.jobs[0], True)
            replica.check()
            for tier in (replica.index.gpu, replica.index.cpu):
                assert not any(tier.pins)
                assert tier.free + tier.snapshots == tier.rows


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=settings().max_examples // 2)
