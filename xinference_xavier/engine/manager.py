"""The scheduler's side of the cache: vLLM's questions become plans, acknowledgements commits.

Covers lookups, plans for loads, stores and moves, and the outcome of jobs. Does not cover copying
(``worker``), policy (``policy``) or peers (``fetching``). Every method runs on the scheduler
thread and waits for nothing but ``lock``: the bridge's thread holds it for microseconds, to pin
rows for a peer or to commit a fetch. Lookups take no lock.

vLLM reports a job's end through ``complete_store`` and ``complete_load``, as a set of keys, and
always as a success. The ledger knows better (which ranks failed, in which order the rows are, what
was in flight at a reset), so those two stay the empty defaults of the base class.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Literal

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)

from xinference_xavier.budgets import shadow_warning
from xinference_xavier.engine.accounts import Accounts
from xinference_xavier.engine.fetching import Fetching
from xinference_xavier.engine.ledger import Job, Ledger
from xinference_xavier.engine.messages import Copied, MoveJob, RankCapacity, RowsSpec
from xinference_xavier.engine.messages import XavierWorkerMetadata as WorkerMetadata
from xinference_xavier.engine.receipts import Receipts, RequestState, Source
from xinference_xavier.policy.columns import ARRIVING, ZOMBIE
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.leases import Leases
from xinference_xavier.policy.order import OrderFactory
from xinference_xavier.policy.planner import Planner, default_low_water, group_of
from xinference_xavier.policy.plans import LoadPlan, MovePlan, StorePlan
from xinference_xavier.types import NOWHERE, Tier, tier_of

logger = logging.getLogger(__name__)

#: By ``Found``: MISS, PENDING, HIT.
_RESULTS = (LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.HIT)


class XavierManager(OffloadingManager):
    """Decides for one replica.

    Args:
        ranks: workers of the replica; each acknowledges every job.
        block_tokens: tokens per block of each KV group.
        order: the eviction order.
        min_fetch: fewest tokens worth reading from a peer.
    """

    def __init__(
        self,
        ranks: int,
        block_tokens: Sequence[int],
        order: OrderFactory,
        min_fetch: int | Literal["auto"] = "auto",
    ) -> None:
        self.block_tokens = tuple(block_tokens)
        self.ranks = ranks
        self._order = order
        self.ledger = Ledger(ranks)
        self.requests: dict[str, RequestState] = {}
        self.copied: dict[str, Copied] = {}
        self.mismatches = 0
        #: Blocks forgotten because a peer read other bytes than were stored.
        self.doubted = 0
        self.capacity = RankCapacity(0, 0, 0, 0, 0)
        #: Bytes of a row on the rank where it takes most.
        self.rank_row_bytes = 0
        #: Budgets that an operator has changed since, in bytes.
        self.budgets: dict[Tier, int] = {}
        self._next_mark = 1
        self._storing: set[int] = set()
        self._min_fetch = min_fetch
        #: Whether a peer seems to hold a key, as the mirror says; set before ``attach``.
        self.at_peer: Callable[[bytes], bool] | None = None
        #: Held for every change of the index.
        self.lock = threading.Lock()
        self.configure(step_blocks=1)

    def configure(self, step_blocks: int, window_groups: Collection[int] = ()) -> None:
        """Learn the model's shape, before ``attach``.

        Args:
            step_blocks: most blocks that one step can fill.
            window_groups: KV groups with a sliding window or a state. The first other group is
                the one whose blocks are counted as hits and misses.
        """
        full = [group for group in range(len(self.block_tokens)) if group not in window_groups]
        self.counted_group = full[0] if full else 0
        self._step_blocks = step_blocks
        self._window_groups = frozenset(window_groups)
        self.receipts = Receipts(self.block_tokens[self.counted_group])
        self.accounts = Accounts(lambda: self.fetching.rates.token_seconds)
        self._set_rows(0, 0)

    def _set_rows(self, gpu_rows: int, cpu_rows: int) -> None:
        self.index = SnapshotIndex(gpu_rows, cpu_rows, self._order)
        self.index.held_elsewhere = self.at_peer
        low_water = default_low_water(gpu_rows, self._step_blocks)
        self.planner = Planner(self.index, low_water, self._window_groups, self._step_blocks)
        self.index.hit_while_fetching = len(self.block_tokens) == 1
        self.leases = Leases(self.index)
        self.fetching = Fetching(
            self.lock, self.planner, self._min_fetch, self.block_tokens[self.counted_group]
        )
        self.fetching.on_end = self.accounts.fetch_ended

    def attach(self, ranks: Collection[RankCapacity]) -> None:
        """Take the ranks' capacities: a tier has as many rows as its poorest rank.

        Called once, before the first request; until then every lookup is a miss.
        """
        self.capacity = RankCapacity(
            gpu_rows=min(rank.gpu_rows for rank in ranks),
            cpu_rows=min(rank.cpu_rows for rank in ranks),
            row_bytes=sum(rank.row_bytes for rank in ranks),
            pool_bytes=sum(rank.pool_bytes for rank in ranks),
            pool_blocks=min(rank.pool_blocks for rank in ranks),
            most_gpu_rows=min(rank.most_gpu_rows for rank in ranks),
            most_cpu_rows=min(rank.most_cpu_rows for rank in ranks),
            elastic=(all(r.elastic[0] for r in ranks), all(r.elastic[1] for r in ranks)),
        )
        self.rank_row_bytes = max(rank.row_bytes for rank in ranks)
        with self.lock:
            self._set_rows(self.capacity.gpu_rows, self.capacity.cpu_rows)
        tokens = self.block_tokens[self.counted_group]
        logger.info(
            "xavier: %d GPU rows and %d CPU rows of %d bytes (%d and %d tokens) over %d rank(s)",
            *(self.capacity.gpu_rows, self.capacity.cpu_rows, self.capacity.row_bytes),
            *(self.capacity.gpu_rows * tokens, self.capacity.cpu_rows * tokens, self.ranks),
        )
        warning = shadow_warning(
            self.capacity.cpu_rows * tokens, self.capacity.pool_blocks * tokens
        )
        if warning is not None:
            logger.warning("xavier: %s", warning)

    def publish_to(
        self, on_change: Callable[[bytes, bool], None], on_clear: Callable[[], None]
    ) -> None:
        """Tell of every key that becomes readable or is forgotten, and of clears; after
        ``attach``."""
        self.index.on_change, self.index.on_clear = on_change, on_clear

    def keys(self) -> Sequence[bytes]:
        """All keys of the index. Any thread."""
        return self.index.keys()

    # -- requests ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.requests[req_context.req_id] = RequestState(self._next_mark)
        self._next_mark += 1
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self.requests.pop(req_context.req_id, None)
        if state is not None:
            self.accounts.resume(state)
            self.fetching.release(state)

    def state_of(self, req_id: str) -> RequestState:
        """The request's state; of a request vLLM never announced, a new one."""
        state = self.requests.get(req_id)
        if state is None:
            state = self.requests[req_id] = RequestState(self._next_mark)
            self._next_mark += 1
        return state

    def retire(self, req_id: str, keys_by_group: Sequence[Sequence[bytes]]) -> None:
        """The request ended: its blocks count as used now, heads as newer than tails."""
        state = self.state_of(req_id)
        in_turns = zip_longest(*keys_by_group)  # no group's blocks older than another's
        keys = [key for turn in in_turns for key in turn if key is not None]
        self.planner.retire(keys, state.mark)

    def waits_for_fetch(self, state: RequestState) -> bool:
        """Whether the request cannot be looked up before its fetch has ended: with several KV
        groups, where a load that waits for bytes could not fail."""
        flying = self.planner.fetches
        return (
            state.fetch_id is not None
            and not self.index.hit_while_fetching
            and flying.is_flying(state.fetch_id)
        )

    # -- loads -------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = self.requests.get(req_context.req_id)
        if state is not None and state.failed_keys and key in state.failed_keys:
            return LookupResult.MISS
        return _RESULTS[self.index.lookup(key)]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> RowsSpec:
        """Pin the keys' rows. Never raises: a key that is gone becomes a failed position."""
        state = self.state_of(req_context.req_id)
        with self.lock:
            plan = self.planner.pin_for_load(list(keys), state.mark)
            flying = self.planner.fetches
            state.loaded = [
                Source.PEER
                if key in state.fetched_keys or flying.is_at(location)
                else Source(tier_of(location))
                for key, location in zip(plan.keys, plan.locations, strict=True)
                if location != NOWHERE and group_of(key) == self.counted_group
            ]
        self.fetching.release(state)  # the load has pins of its own
        return RowsSpec.of(plan)

    # -- stores ------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Reserve rows for new keys. What finds no room is skipped: vLLM would offer a None
        again, longer, at every step."""
        state = self.state_of(req_context.req_id)
        state.offered = True
        with self.lock:
            plan = self.planner.admit(keys, state.mark, state.broken)
        self._storing.add(state.mark)
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in plan.keys],
            store_spec=RowsSpec.of(plan),
            evicted_keys=[],
        )

    # -- jobs --------------------------------------------------------------------------------

    def plan_moves(self) -> list[MoveJob]:
        """This step's demotions and promotions, already open in the ledger."""
        with self.lock:
            plans = self.planner.plan_moves(self._storing)
        self._storing.clear()
        return [MoveJob.of(self.ledger.open_move(plan), plan) for plan in plans]

    def apply(self, report: WorkerMetadata) -> list[str]:
        """Commit what the workers report; returns the requests whose load failed."""
        for kind, work in report.copied.items():
            self.copied[kind] = self.copied.get(kind, Copied()).plus(work)
        self.mismatches += report.mismatches
        for job_id, positions in report.failed.items():
            self.ledger.fail(job_id, positions)
        failed_loads = []
        for completed in (report.completed_jobs, report.completed_moves):
            for job_id, ranks in completed.items():
                job = self.ledger.acknowledge(job_id, ranks)
                if job is None:
                    continue
                with self.lock:
                    failed = self._commit(job)
                if failed:
                    failed_loads.append(job.req_id)
        return failed_loads

    def _commit(self, job: Job) -> bool:
        """Commit one job; True if it is a load that failed."""
        plan = job.plan
        if isinstance(plan, StorePlan):
            self.planner.commit_store(plan, ok=job.failed is None)
        elif isinstance(plan, MovePlan):
            self.planner.commit_move(plan, ok=job.failed is None)
        else:
            failed: Collection[int] = () if job.failed is None else job.failed
            if job.failed is not None and not job.failed:  # the whole of it
                failed = range(len(plan.keys))
            self.planner.finish_load(plan, failed)
            self.accounts.waited(job.opened, plan.waits_for, failed=bool(failed))
            if failed:
                self._note_failed_load(job.req_id, plan, failed)
            return bool(failed)
        return False

    def _note_failed_load(self, req_id: str, plan: LoadPlan, failed: Collection[int]) -> None:
        """Blocks from the first failed one on are computed; vLLM asks again for the others."""
        state = self.requests.get(req_id)
        if state is None:
            return
        state.failed_keys.update(plan.keys[position] for position in failed)
        counted = [
            position
            for position, key in enumerate(plan.keys)
            if group_of(key) == self.counted_group and plan.locations[position] != NOWHERE
        ]
        first = min(failed)
        state.loaded = state.loaded[: sum(1 for position in counted if position < first)]

    # -- vLLM's housekeeping -----------------------------------------------------------------

    def has_pending_work(self) -> bool:
        """Keep stepping while jobs are in flight: only a step brings their acknowledgement."""
        return len(self.ledger) > 0

    def clear(self) -> tuple[int, int]:
        """Forget every snapshot and nothing else: how many rows are free now, and how many will be
        when the jobs and peers that use them have ended.

        What requests that run have yet to store could not be found without what is forgotten.
        """
        with self.lock:
            tiers = (self.index.gpu, self.index.cpu)
            kept = sum(tier.counts[ZOMBIE] + tier.counts[ARRIVING] for tier in tiers)
            removed = self.planner.clear()
            later = sum(tier.counts[ZOMBIE] for tier in tiers) - kept
        full = set(range(len(self.block_tokens))) - self._window_groups
        for state in self.requests.values():
            if state.offered:
                state.broken |= full
        return removed - later, later

    def doubt(self, keys: Collection[bytes]) -> int:
        """Forget those of ``keys`` that a peer found to be other bytes than were stored."""
        with self.lock:
            gone = self.planner.drop(keys)
        before, self.doubted = self.doubted, self.doubted + gone
        if before.bit_length() != self.doubted.bit_length():  # not every one of a burst
            logger.error(
                "xavier: a peer read other bytes than were stored here; the blocks are forgotten "
                "(%d in all)",
                self.doubted,
            )
        return gone

    def reset_cache(self) -> None:
        """Forget every snapshot; rows in use are freed when their jobs have ended."""
        with self.lock:
            self.planner.clear()
