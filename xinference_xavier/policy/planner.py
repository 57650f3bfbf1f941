"""What is admitted, demoted, promoted and evicted: plans first, commits when copies succeeded.

Covers admission, room made ahead of need, promotion of snapshots hit in the CPU tier, and the
outcome of copies. Does not cover copying, ranks or requests' life (``engine``). Runs on vLLM's
scheduler thread, between a step's lookups and the next step's.

Two-phase everywhere: a plan reserves rows and changes no snapshot; a commit publishes them, or
gives them back and leaves every snapshot as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from xinference_xavier.policy.counters import Counters
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.order import NO_ROW
from xinference_xavier.policy.plans import LoadPlan, MovePlan, StorePlan
from xinference_xavier.policy.tier import ARRIVING, LEAVING, READY, WRITING, TierRows
from xinference_xavier.types import NOWHERE, SkipReason, Tier, host_location, row_of

#: Uses counted per step when requests end: 256 take about 0.2 ms of the scheduler thread.
TOUCHES_PER_STEP = 256

#: Ended requests whose uses are still to be counted. When requests end faster than that for long,
#: the oldest are not counted: better than keys and work that pile up without end.
RETIRED_REQUESTS = 256


def default_low_water(gpu_rows: int, step_blocks: int) -> int:
    """Free GPU rows to keep ahead of need: one step's worth of new blocks, a twentieth of the
    tier at least and a quarter of it at most."""
    if not gpu_rows:
        return 0
    return min(max(step_blocks, gpu_rows // 20, 1), max(gpu_rows // 4, 1))


class Planner:
    """Decides for one replica.

    Args:
        index: the snapshots; only this object changes them.
        low_water: free GPU rows kept ahead of need.
        window_groups: KV groups whose hits are suffixes (sliding window, state space): a block
            may be stored though an earlier one was not.
    """

    def __init__(
        self, index: SnapshotIndex, low_water: int, window_groups: Collection[int] = ()
    ) -> None:
        self.index = index
        self.low_water = low_water
        self.counters = Counters()
        self._window_groups = frozenset(window_groups)
        #: Snapshots hit in the CPU tier, oldest hit first, with the mark of the request.
        self._candidates: deque[tuple[bytes, int]] = deque(maxlen=index.gpu.rows)
        self._touches: deque[tuple[Iterator[bytes], int]] = deque(maxlen=RETIRED_REQUESTS)

    # -- stores ------------------------------------------------------------------------------

    def admit(self, keys: Iterable[bytes], mark: int, broken: set[int]) -> StorePlan:
        """Reserve rows for the new ones among ``keys``, blocks of request ``mark`` in order.

        Heads go to free GPU rows, the rest to CPU rows. Never waits: what finds no row is skipped
        and counted. ``broken`` is the request's set of KV groups with a skipped block; it grows.
        Those that are here already count as used: they do not make room for the others.
        """
        wanted, known = self.index.split(keys)
        for key in reversed(known):
            self.index.touch(key, mark)
        if broken:
            offered = len(wanted)
            wanted = [key for key in wanted if group_of(key) not in broken]
            self.counters.skip(SkipReason.PREFIX_NOT_STORED, offered - len(wanted))
        plan = StorePlan()
        gpu, cpu = self.index.gpu, self.index.cpu
        own, reason = frozenset(known), None
        if not cpu.rows:
            reason = self._evict(gpu, len(wanted), mark, own)
        split = min(gpu.free, len(wanted))
        self._reserve(plan, gpu, wanted[:split], mark)
        if split < len(wanted) and cpu.rows:
            reason = self._evict(cpu, len(wanted) - split, mark, own)
            end = split + min(cpu.free, len(wanted) - split)
            self._reserve(plan, cpu, wanted[split:end], mark)
            split = end
        self._skip(wanted[split:], reason, broken)
        return plan

    def _reserve(self, plan: StorePlan, tier: TierRows, keys: Sequence[bytes], mark: int) -> None:
        plan.locations += self.index.reserve(tier, keys, mark)
        plan.keys += keys

    def _evict(
        self, tier: TierRows, need: int, mark: int, own: Collection[bytes]
    ) -> SkipReason | None:
        """Drop snapshots until ``need`` rows are free; says why it stopped short.

        What request ``mark`` used, and its ``own`` keys, stay.
        """
        for _ in range(need - tier.free):
            row = tier.order.victim()
            if row == NO_ROW:
                exceeds = need > tier.rows
                return SkipReason.PROMPT_EXCEEDS_TIER if exceeds else SkipReason.NO_EVICTABLE_ROW
            if tier.mark[row] == mark or tier.key[row] in own:
                return SkipReason.PROMPT_EXCEEDS_TIER
            self._drop(tier, row)
        return None

    def _drop(self, tier: TierRows, row: int) -> None:
        self.index.evict(tier, row)
        if tier is self.index.gpu:
            self.counters.evictions_gpu += 1
        else:
            self.counters.evictions_cpu += 1

    def _skip(self, keys: Sequence[bytes], reason: SkipReason | None, broken: set[int]) -> None:
        for key in keys:
            group = group_of(key)
            if group in broken:
                self.counters.skip(SkipReason.PREFIX_NOT_STORED)
                continue
            self.counters.skip(reason or SkipReason.NO_EVICTABLE_ROW)
            if group not in self._window_groups:
                broken.add(group)

    def commit_store(self, plan: StorePlan, ok: bool) -> None:
        """Every rank has answered: publish the rows, or forget them if any rank failed."""
        gpu = 0
        for key, location in zip(reversed(plan.keys), reversed(plan.locations), strict=True):
            tier, row = self.index.rows_at(location), row_of(location)
            if tier.state[row] != WRITING:  # cleared meanwhile
                tier.abandon(row)
            elif ok:
                tier.publish(row)
                gpu += location >= 0
            else:
                self.index.remove(key)
                tier.abandon(row)
        if ok:
            self.counters.stored_gpu += gpu
            self.counters.stored_cpu += len(plan.keys) - gpu
        else:
            self.counters.failed_copies += 1

    # -- loads -------------------------------------------------------------------------------

    def pin_for_load(self, keys: Sequence[bytes], mark: int) -> LoadPlan:
        """Pin what request ``mark`` is about to read. Never raises: a gone key is ``NOWHERE``."""
        return LoadPlan(mark, list(keys), self.index.pin(keys))

    def finish_load(self, plan: LoadPlan, failed: Collection[int] = ()) -> None:
        """Every rank has answered; ``failed`` are positions no rank should read again.

        A failed row is forgotten. The others count as used, and what lay in the CPU tier becomes
        a candidate for promotion.
        """
        if failed:
            self.counters.failed_copies += 1
        for position in failed:
            if self.index.where(plan.keys[position]) == plan.locations[position]:
                self.index.remove(plan.keys[position])
        self.index.unpin(plan.locations, plan.mark)
        gone = frozenset(failed)
        hits = [
            (key, plan.mark)
            for position, (key, location) in enumerate(zip(plan.keys, plan.locations, strict=True))
            if NOWHERE != location < 0 and position not in gone
        ]
        self._candidates.extend(hits[: self.index.gpu.rows])  # heads: more would not fit

    # -- moves -------------------------------------------------------------------------------

    def plan_moves(self, storing: Collection[int] = ()) -> list[MovePlan]:
        """Demotions that keep the low-water mark, and promotions that fit above it.

        ``storing`` are the marks of requests that stored in this step: their own blocks are not
        demoted to make room for themselves.
        """
        self._count_touches()
        plans = (self._plan_demotions(storing), self._plan_promotions())
        return [plan for plan in plans if plan]

    def _plan_demotions(self, storing: Collection[int]) -> MovePlan:
        plan = MovePlan(Tier.CPU)
        gpu, cpu = self.index.gpu, self.index.cpu
        if not cpu.rows:  # admission drops GPU snapshots itself
            return plan
        want = self.low_water + self._promotion_room()
        want -= gpu.free + gpu.counts[LEAVING]
        rows: list[int] = []
        while len(rows) < want:
            row = gpu.order.victim()
            if row == NO_ROW or gpu.mark[row] in storing:
                break
            if cpu.free == len(rows):
                oldest = cpu.order.victim()
                if oldest == NO_ROW:
                    break
                self._drop(cpu, oldest)
            gpu.leave(row)
            rows.append(row)
        self._start_moves(plan, gpu, rows, cpu)
        return plan

    def _promotion_room(self) -> int:
        """GPU rows worth freeing for candidates: none if the tier holds nothing older."""
        if not self._candidates:
            return 0
        row = self.index.gpu.order.victim()
        if row == NO_ROW or self.index.gpu.mark[row] >= self._candidates[0][1]:
            return 0
        return min(len(self._candidates), self.low_water)

    def _plan_promotions(self) -> MovePlan:
        plan = MovePlan(Tier.GPU)
        gpu, cpu = self.index.gpu, self.index.cpu
        rows: list[int] = []
        while self._candidates and gpu.free - len(rows) > self.low_water:
            key, _ = self._candidates.popleft()
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

    def _start_moves(
        self, plan: MovePlan, source: TierRows, rows: Sequence[int], target: TierRows
    ) -> None:
        """Reserve a target for each row, neighbours for neighbours, so that runs stay runs."""
        demotion = plan.to is Tier.CPU
        target_of = dict(zip(sorted(rows), target.take(len(rows)), strict=True))
        new_rows = [target_of[row] for row in rows]
        plan.keys = [source.key[row] for row in rows]
        target.reserve(new_rows, plan.keys, ARRIVING, 0)
        old, new = list(rows), new_rows
        if demotion:
            new = [host_location(row) for row in new]
        else:
            old = [host_location(row) for row in old]
        plan.sources, plan.targets = old, new

    def commit_move(self, plan: MovePlan, ok: bool) -> None:
        """Every rank has answered: the new rows count, or the sources stay if any rank failed.

        A source that was pinned by somebody else meanwhile stays, and its copy is dropped.
        """
        moved = 0
        steps = list(zip(plan.keys, plan.sources, plan.targets, strict=True))
        if plan.to is Tier.GPU:  # a prefix's head becomes the newest
            steps.reverse()
        for key, source, target in steps:
            moved += self._settle(key, source, target, ok)
        if plan.to is Tier.CPU:
            self.counters.demotions += moved
        else:
            self.counters.promotions += moved
        if ok:
            self.counters.moves_dropped += len(steps) - moved
        else:
            self.counters.failed_copies += 1

    def _settle(self, key: bytes, source: int, target: int, ok: bool) -> bool:
        old, old_row = self.index.rows_at(source), row_of(source)
        new, new_row = self.index.rows_at(target), row_of(target)
        # LEAVING: not cleared meanwhile. One pin: the move's own.
        if ok and old.state[old_row] == LEAVING and old.pins[old_row] == 1:
            self.index.place(key, target)
            new.mark[new_row] = old.mark[old_row]
            new.publish(new_row)
            old.abandon(old_row)
            return True
        new.abandon(new_row)
        old.stay(old_row)
        return False

    # -- requests' ends, clearing ------------------------------------------------------------

    def retire(self, keys: Sequence[bytes], mark: int) -> None:
        """Request ``mark`` ended: count a use of its keys, tail first, over the next steps."""
        self._touches.append((reversed(keys), mark))

    def _count_touches(self) -> None:
        budget = TOUCHES_PER_STEP
        while self._touches and budget > 0:
            keys, mark = self._touches[0]
            batch = list(islice(keys, budget))
            for key in batch:
                self.index.touch(key, mark)
            budget -= len(batch)
            if budget > 0:
                self._touches.popleft()

    def clear(self) -> int:
        """Forget every snapshot; rows in use are freed when their jobs have ended."""
        self._candidates.clear()
        self._touches.clear()
        return self.index.clear()


def group_of(key: bytes) -> int:
    """KV group of a key: its last four bytes, big-endian (vLLM's ``make_offload_key``)."""
    return int.from_bytes(key[-4:], "big")
