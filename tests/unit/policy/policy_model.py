"""A model of what the planner promises, checked after every call, and jobs with several ranks.

Used by the state machines. ``PolicyModel`` makes a call on the real planner and on a dictionary of
what must be readable where, and raises ``AssertionError`` at the first difference.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from xinference_xavier.policy.index import Found, SnapshotIndex
from xinference_xavier.policy.order import NO_ROW, OrderFactory
from xinference_xavier.policy.planner import Planner
from xinference_xavier.policy.plans import LoadPlan, MovePlan, Plan, StorePlan
from xinference_xavier.policy.tier import TierRows
from xinference_xavier.types import NOWHERE, SkipReason, Tier, host_location, row_of

RANKS = 2


def key_of(prompt: int, position: int, group: int = 0) -> bytes:
    """Key of a block; prompts 0 and 1, 2 and 3, ... share their first two blocks."""
    if position < 2:
        prompt -= prompt % 2
    return f"{prompt:03}/{position:04}/".encode() + group.to_bytes(4, "big")


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


class ReferenceOrder:
    """LRU on an OrderedDict; refuses calls that the protocol forbids."""

    def __init__(self, rows: int) -> None:
        self.rows: OrderedDict[int, None] = OrderedDict()

    def add(self, row: int, key: bytes) -> None:
        assert row not in self.rows
        self.rows[row] = None

    def discard(self, row: int) -> None:
        del self.rows[row]

    def touch(self, row: int) -> None:
        self.rows.move_to_end(row)

    def victim(self) -> int:
        return next(iter(self.rows), NO_ROW)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


@dataclass(eq=False)
class Job:
    """A plan in flight. ``answers``: rank to success, filled in any order."""

    plan: Plan
    answers: dict[int, bool] = field(default_factory=dict)
    #: Positions of a load that failed on some rank.
    failed: set[int] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return len(self.answers) == RANKS

    @property
    def ok(self) -> bool:
        return all(self.answers.values())

    def claims(self) -> Iterator[tuple[int, bytes]]:
        """Locations that the job pins, with the key each must keep."""
        plan = self.plan
        if isinstance(plan, MovePlan):
            yield from zip(plan.sources, plan.keys, strict=True)
            yield from zip(plan.targets, plan.keys, strict=True)
        else:
            for location, key in zip(plan.locations, plan.keys, strict=True):
                if location != NOWHERE:
                    yield location, key

    def writes(self) -> Sequence[int]:
        if isinstance(self.plan, MovePlan):
            return self.plan.targets
        return self.plan.locations if isinstance(self.plan, StorePlan) else ()


class PolicyModel:
    """The planner beside what it must do."""

    def __init__(
        self,
        gpu_rows: int,
        cpu_rows: int,
        low_water: int,
        order: OrderFactory,
        window_groups: Collection[int] = (),
    ) -> None:
        self.index = SnapshotIndex(gpu_rows, cpu_rows, order)
        self.planner = Planner(self.index, low_water, window_groups)
        self.window_groups = window_groups
        self.jobs: list[Job] = []
        self.readable: dict[bytes, int] = {}
        self.writing: dict[bytes, int] = {}
        self.seen: set[bytes] = set()

    # -- what holds at any time --------------------------------------------------------------

    def check(self) -> None:
        self.index.validate()
        for key in self.seen:
            expected = Found.MISS
            if key in self.writing:
                expected = Found.PENDING
            elif key in self.readable:
                expected = Found.HIT
            assert self.index.lookup(key) is expected, key
            assert self.index.where(key) == self._location(key)
        self._check_pins()

    def _location(self, key: bytes) -> int:
        return self.writing.get(key, self.readable.get(key, NOWHERE))

    def _check_pins(self) -> None:
        """Pins are exactly the jobs in flight; whoever writes a row has it alone."""
        pins = Counter[int]()
        for job in self.jobs:
            for location, key in job.claims():
                pins[location] += 1
                assert self.index.rows_at(location).key[row_of(location)] == key
        for tier, name in ((self.index.gpu, Tier.GPU), (self.index.cpu, Tier.CPU)):
            for row in range(len(tier.state)):
                assert tier.pins[row] == pins[row if name is Tier.GPU else host_location(row)]
        for job in self.jobs:
            assert all(pins[location] == 1 for location in job.writes())

    def _occupied(self) -> set[int]:
        claimed = {location for job in self.jobs for location, _ in job.claims()}
        return claimed | set(self.readable.values()) | set(self.writing.values())

    def _evictable(self, tier: TierRows, but: Collection[bytes] = ()) -> list[bytes]:
        return [tier.key[row] for row in tier.order if tier.key[row] not in but]

    def _forget_lost(self) -> dict[bytes, int]:
        """Drop from the model what the planner evicted in this call."""
        lost = {key: where for key, where in self.readable.items() if key not in self.index}
        for key in lost:
            del self.readable[key]
        return lost

    def _counters(self) -> dict[str, int]:
        counters = self.planner.counters
        return counters.as_dict() | counters.skips

    # -- stores ------------------------------------------------------------------------------

    def admit(self, keys: Sequence[bytes], mark: int, broken: set[int]) -> Job:
        self.seen.update(keys)
        index, tier = self.index, self.index.cpu if self.index.cpu.rows else self.index.gpu
        new = [key for key in dict.fromkeys(keys) if self._location(key) == NOWHERE]
        victims, occupied = self._evictable(tier, but=keys), self._occupied()
        marks = {tier.key[row]: tier.mark[row] for row in tier.order}
        was_broken, before = set(broken), self._counters()
        paused, sifting = self.planner.paused, not tier._free.sifted

        job = Job(self.planner.admit(keys, mark, broken))
        plan, after = job.plan, self._counters()
        assert isinstance(plan, StorePlan)
        self.writing.update(zip(plan.keys, plan.locations, strict=True))
        if plan.keys:
            self.jobs.append(job)
        lost = self._forget_lost()
        assert set(lost) == set(victims[: len(lost)]), "victims are the head of the order"
        assert all(marks[key] != mark for key in lost), "victims belong to other requests"
        name = "evictions_cpu" if tier is index.cpu else "evictions_gpu"
        assert after[name] - before[name] == len(lost)
        assert not (occupied - set(lost.values())) & set(plan.locations), (
            "only free rows are written"
        )
        self._check_admitted(plan, new, was_broken)
        assert all(row_of(at) < index.rows_at(at).rows for at in plan.locations), "rows that go"
        skipped = sum(after[r.value] - before[r.value] for r in SkipReason)
        assert skipped == len(new) - len(plan.keys)
        if paused:
            assert not plan.keys
            assert not lost
            assert after["paused"] - before["paused"] == skipped
        elif skipped and broken != was_broken and not sifting:
            head = tier.order.victim()
            assert tier.free == 0, "skipped though a row was free"
            own = head == NO_ROW or tier.mark[head] == mark or tier.key[head] in keys
            assert own, "skipped though a row was evictable"
        return job

    def _check_admitted(self, plan: StorePlan, new: list[bytes], broken: set[int]) -> None:
        """Blocks are stored in order, GPU rows first, without holes but in window groups."""
        stored = set(plan.keys)
        assert plan.keys == [key for key in new if key in stored]
        tiers = [location < 0 for location in plan.locations]
        assert tiers == sorted(tiers), "heads lie in the GPU tier"
        for group in {group_of(key) for key in new}:
            offered = [key for key in new if group_of(key) == group]
            kept = [key for key in offered if key in stored]
            if group in broken:
                assert not kept
            elif group not in self.window_groups:
                assert kept == offered[: len(kept)]

    def commit_store(self, job: Job) -> None:
        plan, before = job.plan, self._counters()
        assert isinstance(plan, StorePlan)
        self.planner.commit_store(plan, job.ok)
        for key, location in zip(plan.keys, plan.locations, strict=True):
            if self.writing.get(key) == location:
                del self.writing[key]
                if job.ok:
                    self.readable[key] = location
        if not job.ok:
            assert self._counters() == before | {"failed_copies": before["failed_copies"] + 1}

    # -- loads -------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], mark: int) -> Job:
        self.seen.update(keys)
        before = self._counters()
        plan = self.planner.pin_for_load(keys, mark)
        assert plan.keys == list(keys)
        assert plan.locations == [self.readable.get(key, NOWHERE) for key in keys]
        assert self._counters() == before
        job = Job(plan)
        self.jobs.append(job)
        return job

    def finish_load(self, job: Job) -> None:
        plan, before = job.plan, self._counters()
        assert isinstance(plan, LoadPlan)
        self.planner.finish_load(plan, job.failed)
        for position in job.failed:
            key, location = plan.keys[position], plan.locations[position]
            if location != NOWHERE and self.readable.get(key) == location:
                del self.readable[key]
        failures = before["failed_copies"] + bool(job.failed)
        assert self._counters() == before | {"failed_copies": failures}

    # -- moves -------------------------------------------------------------------------------

    def plan_moves(self, storing: Collection[int]) -> list[Job]:
        index, occupied, before = self.index, self._occupied(), self._counters()
        pinned = {location for job in self.jobs for location, _ in job.claims()}
        resizing = bool(self.planner.resizer.shrinking)
        plans = self.planner.plan_moves(storing)
        jobs = [Job(plan) for plan in plans]
        self.jobs.extend(jobs)
        lost, after = self._forget_lost(), self._counters()
        evictions = ("evictions_cpu", "evictions_gpu")
        assert len(lost) == sum(after[name] - before[name] for name in evictions)
        assert after == before | {name: after[name] for name in evictions}
        if not resizing:
            assert after["evictions_gpu"] == before["evictions_gpu"]
            assert len(lost) <= sum(len(p.keys) for p in plans if p.to is Tier.CPU)
        assert not pinned & set(lost.values()), "a pinned row is never dropped"
        for plan in plans:
            self._check_move(plan, pinned, occupied - set(lost.values()), resizing)
            if not plan.relocates and plan.to is Tier.CPU:
                assert not {index.gpu.mark[row] for row in plan.sources} & set(storing)
            elif not plan.relocates and not resizing:
                assert index.gpu.free >= self.planner.moves.low_water
        return jobs

    def _check_move(
        self, plan: MovePlan, pinned: set[int], occupied: set[int], resizing: bool
    ) -> None:
        assert plan.keys
        assert plan.sources == [self.readable[key] for key in plan.keys]
        assert not pinned & set(plan.sources), "a pinned row is never moved"
        assert not occupied & set(plan.targets), "only free rows"
        assert all(row_of(at) < self.index.rows_at(at).rows for at in plan.targets), "rows that go"
        if plan.relocates:
            assert resizing
            assert all(row_of(at) >= self.index.rows_at(at).rows for at in plan.sources)

    def commit_move(self, job: Job) -> None:
        plan, before = job.plan, self._counters()
        assert isinstance(plan, MovePlan)
        pins = Counter(location for other in self.jobs for location, _ in other.claims())
        moved = [
            (key, target)
            for key, source, target in zip(plan.keys, plan.sources, plan.targets, strict=True)
            if job.ok and self.readable.get(key) == source and not pins[source]
        ]
        self.planner.commit_move(plan, job.ok)
        self.readable.update(moved)
        if job.ok:
            name = "demotions" if plan.to is Tier.CPU else "promotions"
            name = "relocations" if plan.relocates else name
            expected = {name: before[name] + len(moved)}
            expected["moves_dropped"] = before["moves_dropped"] + len(plan.keys) - len(moved)
        else:
            expected = {"failed_copies": before["failed_copies"] + 1}
        assert self._counters() == before | expected

    # -- ends --------------------------------------------------------------------------------

    def commit(self, job: Job) -> None:
        """Every rank has answered."""
        assert job.done
        self.jobs.remove(job)
        if isinstance(job.plan, StorePlan):
            self.commit_store(job)
        elif isinstance(job.plan, LoadPlan):
            self.finish_load(job)
        else:
            self.commit_move(job)

    def clear(self) -> None:
        assert self.planner.clear() == len(self.readable) + len(self.writing)
        self.readable.clear()
        self.writing.clear()

    def resize(self, tier: Tier, rows: int) -> None:
        """Begin to give a tier another number of rows, unless it is being shrunk."""
        if tier in self.planner.resizer.shrinking:
            return
        before = dict(self.readable)
        self.planner.resizer.set_rows(tier, rows)
        assert not self._forget_lost()
        assert self.readable == before, "a change of size drops nothing at once"

    def finish_resizes(self) -> None:
        """Steps until every tier has the size that was asked for."""
        for _ in range(200):
            if not self.planner.resizer.shrinking:
                break
            for job in self.plan_moves(()):
                job.answers = dict.fromkeys(range(RANKS), True)
                self.commit(job)
            self.check()
        for tier in (self.index.gpu, self.index.cpu):
            assert len(tier.state) == len(tier.key) == len(tier.pins) == tier.rows

    def drain(self, jobs: Iterable[Job] = ()) -> None:
        """Acknowledge everything; nothing but snapshots and free rows may be left."""
        for job in list(jobs) or list(self.jobs):
            for rank in range(RANKS):
                job.answers.setdefault(rank, True)
            self.commit(job)
            self.check()
        self.finish_resizes()
        for tier in (self.index.gpu, self.index.cpu):
            assert tier.free + tier.snapshots == tier.rows
            assert not any(tier.pins)
