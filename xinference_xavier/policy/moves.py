"""Which snapshots change tier: demotions ahead of need, promotions of what was hit.

Covers plans for moves and their outcome. Does not cover stores and loads (``planner``) or copying
(``storage``). Runs on vLLM's scheduler thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from xinference_xavier.policy.columns import ARRIVING, LEAVING, READY
from xinference_xavier.policy.counters import Counters
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.order import NO_ROW
from xinference_xavier.policy.plans import LoadPlan, MovePlan
from xinference_xavier.policy.tier import TierRows
from xinference_xavier.types import NOWHERE, Tier, host_location, row_of

#: Candidates looked at in one step; also the most that one promotion moves.
CANDIDATES_PER_STEP = 256
#: Victims dropped in vain to make room in a tier that shrinks, before it counts as full.
VICTIMS_BEYOND = 256


def default_low_water(gpu_rows: int, step_blocks: int) -> int:
    """Free GPU rows to keep ahead of need: one step's worth of new blocks, a twentieth of the
    tier at least and a quarter of it at most."""
    if not gpu_rows:
        return 0
    return min(max(step_blocks, gpu_rows // 20, 1), max(gpu_rows // 4, 1))


class Mover:
    """Moves between the tiers of one index.

    Args:
        index: the snapshots.
        counters: where moves are counted.
        low_water: free GPU rows kept ahead of need.
    """

    def __init__(self, index: SnapshotIndex, counters: Counters, low_water: int) -> None:
        self.index = index
        self.counters = counters
        self.low_water = low_water
        #: Snapshots hit in the CPU tier, oldest hit first, with the mark of the request.
        self._candidates: OrderedDict[bytes, int] = OrderedDict()

    def clear(self) -> None:
        """Forget what was to be promoted."""
        self._candidates.clear()

    def propose(self, plan: LoadPlan, failed: Collection[int]) -> None:
        """Heads hit in the CPU tier, as many as the GPU tier has rows, become candidates."""
        room = self.index.gpu.rows
        hits = (
            key
            for position, (key, location) in enumerate(zip(plan.keys, plan.locations, strict=True))
            if NOWHERE != location < 0 and position not in failed
        )
        for key in islice(hits, room):
            self._candidates[key] = plan.mark
            self._candidates.move_to_end(key)
        while len(self._candidates) > room:
            self._candidates.popitem(last=False)

    def plan(self, storing: Collection[int] = ()) -> list[MovePlan]:
        """Demotions that keep the low-water mark, and promotions that fit above it.

        ``storing`` are the marks of requests that stored in this step: their own blocks are not
        demoted to make room for themselves.
        """
        plans = [self._plan_demotions(storing), self._plan_promotions()]
        plans += [self._plan_relocations(tier) for tier in (self.index.gpu, self.index.cpu)]
        return [plan for plan in plans if plan]

    def _plan_demotions(self, storing: Collection[int]) -> MovePlan:
        plan = MovePlan(Tier.CPU)
        gpu, cpu = self.index.gpu, self.index.cpu
        if not cpu.rows:  # admission drops GPU snapshots itself
            return plan
        leaving = gpu.counts[LEAVING]
        need = max(self.low_water - gpu.free, min(gpu.excess, CANDIDATES_PER_STEP)) - leaving
        want = need + self._promotion_room()
        rows: list[int] = []
        while len(rows) < want:
            row = gpu.order.victim()
            if row == NO_ROW or gpu.mark[row] in storing:
                break
            if not self._make_cpu_room(len(rows), for_promotion=len(rows) >= need):
                break
            gpu.leave(row)
            rows.append(row)
        self._start_moves(plan, gpu, rows, cpu)
        return plan

    def can_demote(self) -> bool:
        """Whether a demotion would find a row."""
        cpu = self.index.cpu
        return bool(cpu.rows) and (cpu.free > 0 or cpu.order.victim() != NO_ROW)

    def _make_cpu_room(self, taken: int, for_promotion: bool) -> bool:
        """Whether a demotion finds a row beside ``taken``; drops the oldest snapshot if need be.

        For a promotion nothing is dropped that is as recent as what shall be promoted.
        """
        cpu = self.index.cpu
        # One that lies beyond the end of a tier that shrinks makes no room.
        for _ in range(1 if cpu.top <= cpu.rows else VICTIMS_BEYOND):
            if cpu.free > taken:
                return True
            oldest = self.index.victim(cpu)
            if oldest == NO_ROW or (for_promotion and cpu.mark[oldest] >= self._oldest_candidate()):
                return False
            self.index.evict(cpu, oldest)
            self.counters.evictions_cpu += 1
        return cpu.free > taken

    def _oldest_candidate(self) -> int:
        return next(iter(self._candidates.values()))

    def _promotion_room(self) -> int:
        """GPU rows worth freeing for candidates: none if the tier holds nothing older."""
        if not self._candidates:
            return 0
        row = self.index.gpu.order.victim()
        if row == NO_ROW or self.index.gpu.mark[row] >= self._oldest_candidate():
            return 0
        return min(len(self._candidates), self.low_water)

    def _plan_promotions(self) -> MovePlan:
        plan = MovePlan(Tier.GPU)
        gpu, cpu = self.index.gpu, self.index.cpu
        rows: list[int] = []
        for _ in range(CANDIDATES_PER_STEP):
            if not self._candidates or gpu.free - len(rows) <= self.low_water:
                break
            key, _ = self._candidates.popitem(last=False)
            location = self.index.where(key)
            row = row_of(location)
            if location == NOWHERE or location >= 0 or cpu.state[row] != READY:
                continue
            if not cpu.pins[row]:
                cpu.leave(row)
                rows.append(row)
        self._start_moves(plan, cpu, rows, gpu)
        if self._candidates and not self._promotion_room() and not gpu.counts[LEAVING]:
            self._candidates.clear()  # everything in the GPU tier is at least as recent
        return plan

    def _plan_relocations(self, tier: TierRows) -> MovePlan:
        """Once no more is left in a tier that shrinks than will fit: rows that go leave for rows
        that stay. One look at some of them; the next step goes on below."""
        plan = MovePlan(Tier.GPU if tier is self.index.gpu else Tier.CPU)
        if tier.top <= tier.rows or tier.excess > 0:
            return plan
        rows = tier.leavable(min(CANDIDATES_PER_STEP, tier.free))
        for row in rows:
            tier.leave(row)
        self._start_moves(plan, tier, rows, tier)
        return plan

    def _start_moves(
        self, plan: MovePlan, source: TierRows, rows: Sequence[int], target: TierRows
    ) -> None:
        """Reserve a target for each row, neighbours for neighbours, so that runs stay runs."""
        if not rows:
            return
        target_of = dict(zip(sorted(rows), target.take(len(rows)), strict=True))
        new_rows = [target_of[row] for row in rows]
        plan.keys = [source.key[row] for row in rows]
        target.reserve(new_rows, plan.keys, ARRIVING, 0)
        plan.sources, plan.targets = (
            self._locations(source, rows),
            self._locations(target, new_rows),
        )

    def _locations(self, tier: TierRows, rows: Sequence[int]) -> list[int]:
        return list(rows) if tier is self.index.gpu else [host_location(row) for row in rows]

    def commit(self, plan: MovePlan, ok: bool) -> None:
        """Every rank has answered: the new rows count, or the sources stay if any rank failed.

        A source that was pinned by somebody else meanwhile stays, and its copy is dropped.
        """
        old, new = self.index.rows_at(plan.sources[0]), self.index.rows_at(plan.targets[0])
        steps = list(zip(plan.keys, plan.sources, plan.targets, strict=True))
        if new is self.index.gpu:  # a prefix's head becomes the newest
            steps.reverse()
        moved = 0
        for key, source, target in steps:
            row, new_row = row_of(source), row_of(target)
            # LEAVING: not cleared meanwhile. One pin: the move's own.
            if ok and old.state[row] == LEAVING and old.pins[row] == 1:
                self.index.place(key, target)
                new.mark[new_row], new.uses[new_row] = old.mark[row], old.uses[row]
                new.publish(new_row)
                old.abandon(row)
                moved += 1
            else:
                new.abandon(new_row)
                old.stay(row)
        self._count_moves(plan, moved, ok)

    def _count_moves(self, plan: MovePlan, moved: int, ok: bool) -> None:
        if plan.relocates:
            self.counters.relocations += moved
        elif plan.to is Tier.CPU:
            self.counters.demotions += moved
        else:
            self.counters.promotions += moved
        if ok:
            self.counters.moves_dropped += len(plan.keys) - moved
        else:
            self.counters.failed_copies += 1
