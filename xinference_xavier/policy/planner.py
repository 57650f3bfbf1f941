"""What is admitted, read and evicted: plans first, commits when copies succeeded.

Covers stores, loads, requests' ends and clearing. What changes tier is decided in ``moves``, what
becomes of fetched rows in ``fetches``. Does not cover copying, ranks or requests' life
(``engine``). Runs on vLLM's scheduler thread, between a step's lookups and the next step's.

Two-phase everywhere: a plan reserves rows and changes no snapshot; a commit publishes them, or
gives them back and leaves every snapshot as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from xinference_xavier.policy.columns import FETCHING, LEAVING, READY, WRITING
from xinference_xavier.policy.counters import Counters
from xinference_xavier.policy.fetches import Fetches
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.keys import group_of, tails_first
from xinference_xavier.policy.moves import VICTIMS_BEYOND, Mover, default_low_water
from xinference_xavier.policy.order import NO_ROW
from xinference_xavier.policy.plans import FetchPlan, LoadPlan, MovePlan, StorePlan
from xinference_xavier.policy.resize import Resizer
from xinference_xavier.policy.tier import TierRows
from xinference_xavier.types import NOWHERE, SkipReason, row_of

__all__ = ["Planner", "default_low_water", "group_of"]

#: Uses counted in one step when requests end: 256 take about 0.2 ms of the scheduler thread.
TOUCHES_PER_STEP = 256

#: Ended requests whose uses are still to be counted. When requests end faster than that for long,
#: the oldest are not counted: better than keys and work that pile up without end.
RETIRED_REQUESTS = 256


#: Forgotten keys whose memory is freed in one step, after a clear: about 0.2 ms.
TIDIED_PER_STEP = 2_048


class Planner:
    """Decides for one replica.

    Args:
        index: the snapshots; only this object changes them.
        low_water: free GPU rows kept ahead of need.
        window_groups: KV groups whose hits are suffixes (sliding window, state space): a block
            may be stored though an earlier one was not.
        step_blocks: most blocks that one step fills.
    """

    def __init__(
        self,
        index: SnapshotIndex,
        low_water: int,
        window_groups: Collection[int] = (),
        step_blocks: int = 1,
    ) -> None:
        self.index = index
        self.counters = Counters()
        self.moves = Mover(index, self.counters, low_water)
        self.fetches = Fetches(index, self.counters)
        self.resizer = Resizer(index, self.moves, step_blocks)
        #: While True nothing new is stored. Any thread may set it.
        self.paused = False
        self._window_groups = frozenset(window_groups)
        self._touches: deque[tuple[Iterator[bytes], int]] = deque(maxlen=RETIRED_REQUESTS)

    # -- stores ------------------------------------------------------------------------------

    def admit(self, keys: Iterable[bytes], mark: int, broken: set[int]) -> StorePlan:
        """Reserve rows for the new ones among ``keys``, blocks of request ``mark`` in order.

        Heads go to free GPU rows, the rest to CPU rows. Never waits: what finds no row is skipped
        and counted. ``broken`` is the request's set of KV groups with a skipped block; it grows.
        Those that are here already count as used: they do not make room for the others.
        """
        wanted, known = self.index.split(keys)
        for position in tails_first(known):
            self.index.touch(known[position], mark)
        last = self.index.cpu if self.index.cpu.rows else self.index.gpu
        self.index.ghosts.admit(wanted, last.rows)
        if self.paused:
            self._skip_paused(wanted, broken)
            return StorePlan()
        if broken:
            offered = len(wanted)
            wanted = [key for key in wanted if group_of(key) not in broken]
            self.counters.skip(SkipReason.PREFIX_NOT_STORED, offered - len(wanted))
        keys, locations, reason = self.reserve(wanted, mark, frozenset(known))
        self._skip(wanted[len(keys) :], reason, broken)
        return StorePlan(keys, locations)

    def reserve(
        self, wanted: Sequence[bytes], mark: int, own: Collection[bytes], state: int = WRITING
    ) -> tuple[list[bytes], list[int], SkipReason | None]:
        """Rows in ``state`` for as many of ``wanted`` as find one: free GPU rows, then CPU rows.

        Returns the keys, their locations, and why it stopped short. Request ``mark``'s ``own``
        keys make no room.
        """
        gpu, cpu, reason = self.index.gpu, self.index.cpu, None
        if not cpu.rows:
            reason = self._evict(gpu, len(wanted), mark, own)
        split = min(gpu.free, len(wanted))
        locations = self.index.reserve(gpu, wanted[:split], mark, state)
        if split < len(wanted) and cpu.rows:
            reason = self._evict(cpu, len(wanted) - split, mark, own)
            end = split + min(cpu.free, len(wanted) - split)
            locations += self.index.reserve(cpu, wanted[split:end], mark, state)
            split = end
        return list(wanted[:split]), locations, reason

    def _evict(
        self, tier: TierRows, need: int, mark: int, own: Collection[bytes]
    ) -> SkipReason | None:
        """Drop snapshots until ``need`` rows are free; says why it stopped short.

        What request ``mark`` used, and its ``own`` keys, stay.
        """
        evicted, reason = 0, None
        # Those that lie beyond the end of a tier that shrinks make no room.
        most = need - tier.free + (VICTIMS_BEYOND if tier.top > tier.rows else 0)
        victim = partial(self.index.victim, tier, mark)
        while reason is None and tier.free < need and evicted < most:
            count = min(need - tier.free, most - evicted)
            rows, last = tier.take_victims(count, mark, own, victim)
            if last is not None:
                exceeds = last != NO_ROW or need > tier.rows
                reason = SkipReason.PROMPT_EXCEEDS_TIER if exceeds else SkipReason.NO_EVICTABLE_ROW
            self.index.evict_taken(tier, rows)
            evicted += len(rows)
        if tier is self.index.gpu:
            self.counters.evictions_gpu += evicted
        else:
            self.counters.evictions_cpu += evicted
        return reason

    def _skip(self, keys: Sequence[bytes], reason: SkipReason | None, broken: set[int]) -> None:
        for key in keys:
            group = group_of(key)
            if group in broken:
                self.counters.skip(SkipReason.PREFIX_NOT_STORED)
                continue
            self.counters.skip(reason or SkipReason.NO_EVICTABLE_ROW)
            if group not in self._window_groups:
                broken.add(group)

    def _skip_paused(self, keys: Sequence[bytes], broken: set[int]) -> None:
        """What follows these blocks could never be hit once stores go on."""
        self.counters.skip(SkipReason.PAUSED, len(keys))
        broken.update({group_of(key) for key in keys} - self._window_groups)

    def commit_store(self, plan: StorePlan, ok: bool) -> None:
        """Every rank has answered: publish the rows, or forget them if any rank failed."""
        gpu, cpu, locations = self.index.gpu, self.index.cpu, plan.locations
        gpu_rows: list[int] = []
        cpu_rows: list[int] = []
        keys: list[bytes] = []
        for position in tails_first(plan.keys):
            location = locations[position]
            tier, row = (gpu, location) if location >= 0 else (cpu, ~location)
            if ok and tier.state[row] == WRITING:
                (gpu_rows if location >= 0 else cpu_rows).append(row)
                keys.append(plan.keys[position])
                continue
            if tier.state[row] == WRITING:  # not cleared meanwhile
                self.index.remove(plan.keys[position])
            tier.abandon(row)
        gpu.publish_all(gpu_rows)
        cpu.publish_all(cpu_rows)
        for key in keys:
            self.index.on_change(key, True)
        if ok:
            self.counters.stored_gpu += len(gpu_rows)
            self.counters.stored_cpu += len(plan.keys) - len(gpu_rows)
        else:
            self.counters.failed_copies += 1

    # -- loads -------------------------------------------------------------------------------

    def pin_for_load(self, keys: Sequence[bytes], mark: int) -> LoadPlan:
        """Pin what request ``mark`` is about to read. Never raises: a gone key is ``NOWHERE``."""
        locations = self.index.pin(keys)
        return LoadPlan(mark, list(keys), locations, self.fetches.among(locations))

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
        used = [plan.locations[position] for position in tails_first(plan.keys)]
        self.index.unpin(used, plan.mark)
        self.moves.propose(plan, frozenset(failed))

    def drop(self, keys: Collection[bytes]) -> int:
        """Forget those of ``keys`` that can be read; how many. Loads under way go on."""
        dropped = 0
        for key in keys:
            location = self.index.where(key)
            if location == NOWHERE:
                continue
            if self.index.rows_at(location).state[row_of(location)] in (READY, LEAVING):
                self.index.remove(key)
                dropped += 1
        return dropped

    # -- fetches -----------------------------------------------------------------------------

    def plan_fetch(self, keys: Sequence[bytes], mark: int) -> FetchPlan | None:
        """Reserve rows for a head of ``keys``, in order, which a peer holds; None without any.

        Under the budgets and the order of any other snapshot; while fetched rows hold more than
        their share of the tiers, nothing more is fetched.
        """
        wanted, _ = self.index.split(keys)
        wanted = wanted[: self.fetches.room()]
        keys, locations, _ = self.reserve(wanted, mark, frozenset(), FETCHING)
        return self.fetches.start(mark, keys, locations) if keys else None

    # -- moves -------------------------------------------------------------------------------

    def plan_moves(self, storing: Collection[int] = ()) -> list[MovePlan]:
        """This step's demotions and promotions; ``storing`` requests do not demote themselves."""
        self._count_touches()
        self.index.tidy(TIDIED_PER_STEP)
        self.resizer.step()
        return self.moves.plan(storing)

    def commit_move(self, plan: MovePlan, ok: bool) -> None:
        """Every rank has answered: the new rows count, or the sources stay if any rank failed."""
        self.moves.commit(plan, ok)

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
        self.moves.clear()
        self._touches.clear()
        return self.index.clear()
