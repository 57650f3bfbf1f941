"""vLLM's connector of the cache: its own offloading connector, plus moves, truth and receipts.

Made twice by vLLM: in the scheduler (role SCHEDULER) and in each worker (role WORKER). Methods of
the first role run on the scheduler thread, those of the second on the worker's main thread; none
waits for a copy, an actor or the network.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from xinference_xavier import swallowed
from xinference_xavier.actors.bridge import Bridge
from xinference_xavier.actors.fetcher import FetchOutcome
from xinference_xavier.engine import accounts, compat, compat_receipts
from xinference_xavier.engine.fetching import choose
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.membership import join
from xinference_xavier.engine.messages import (
    RankCapacity,
    XavierConnectorMetadata,
    XavierWorkerMetadata,
)
from xinference_xavier.engine.namespace import describe
from xinference_xavier.engine.prompts import Prompts
from xinference_xavier.engine.receipts import Receipt, RequestState
from xinference_xavier.engine.settings import EngineSettings, cluster_secret
from xinference_xavier.engine.stats import Stats
from xinference_xavier.engine.steering import Steering
from xinference_xavier.engine.worker import XavierWorker

logger = logging.getLogger(__name__)


class XavierGpuConnector(OffloadingConnector):
    """GPU-first snapshot cache of KV blocks."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is None:
            return
        self._kv_config = kv_cache_config
        manager = self._manager
        per_step = vllm_config.scheduler_config.max_num_batched_tokens
        manager.configure(
            step_blocks=sum(-(-per_step // tokens) for tokens in manager.block_tokens),
            window_groups=compat.window_groups(self.connector_scheduler),
        )
        self._groups = compat.groups(self.connector_scheduler, manager.block_tokens)
        compat.serve_block_holders_first()
        if len(manager.block_tokens) > 1:
            compat.recompute_whole_requests()
        if vllm_config.device_config.device_type != "cpu":
            manager.accounts.slowing = accounts.SLOWING_ON_GPU
        assert vllm_config.kv_transfer_config is not None
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = EngineSettings.from_extra(extra_config)
        if settings.options.xavier_receipts:
            manager.receipts.untold = {}
            compat_receipts.send_with_first_outputs()
        self._stats = Stats(manager, settings)
        prompts = Prompts(
            manager,
            compat.prompt_hasher(vllm_config, kv_cache_config, self.connector_scheduler),
            lambda: self._stats.block_pool,
            self._at_peer,
        )
        manager.at_peer = self._at_peer
        compat.watch_for_wakes()
        self._steering = Steering(manager, compat.wake, prompts.find)
        self._bridge = Bridge(
            self._stats.identity(),
            settings.listen_host,
            settings.tracker_address,
            self._stats.collect,
            secret=cluster_secret(),
            steer=self._steering,
        )
        self._settings = settings
        self._stats.peers = self._count_peers
        self._bridge.start()

    def _count_peers(self) -> int:
        sharing = self._bridge.sharing
        return 0 if sharing is None or sharing.peers is None else len(sharing.peers.usable)

    def _at_peer(self, key: bytes) -> bool:
        sharing = self._bridge.sharing
        if sharing is None or sharing.peers is None:
            return False
        return any(sharing.mirror.holds(member, key) for member in sharing.peers.usable)

    @property
    def _manager(self) -> XavierManager:
        assert self.connector_scheduler is not None
        manager = self.connector_scheduler.manager
        assert isinstance(manager, XavierManager)
        return manager

    @property
    def untold_receipts(self) -> dict[str, Receipt] | None:
        """For ``compat_receipts``: receipts that wait for their requests' first output."""
        return self._manager.receipts.untold

    @property
    def _worker(self) -> XavierWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, XavierWorker)
        return worker

    def shutdown(self) -> None:
        if self.connector_scheduler is not None:
            self._bridge.close()
        super().shutdown()

    # -- worker ------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return self._worker.capacity

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, XavierConnectorMetadata)
        requests = {job_id: job.req_id for job_id, job in metadata.load_jobs.items()}
        self._worker.expect_loads(requests, metadata.waits)
        self._worker.end_fetches(metadata.ended)
        super().start_load_kv(forward_context, **kwargs)
        self._worker.submit_moves(metadata.moves)
        self._worker.resize(metadata.resizes)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Where vLLM asks for it (0.28 and later): also the requests whose load failed."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad_blocks = self._worker.take_bad_blocks()
        if compat.REPORTS_FAILED_REQUESTS:  # told by ``get_transfer_results``, just before
            return set()
        self._worker.take_failed_requests()  # told by their blocks
        return bad_blocks

    def build_connector_worker_meta(self) -> XavierWorkerMetadata | None:
        report = self._worker.take_report()
        base = super().build_connector_worker_meta()
        if base is not None:
            report.completed_jobs = base.completed_jobs
            report.transfer_stats = base.transfer_stats
        return None if report.is_empty() else report

    # -- scheduler ---------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._stats.block_pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every pipeline stage has rows of its own size; the poorest rank decides."""
        ranks = {p: rank for p, rank in metadata.items() if isinstance(rank, RankCapacity)}
        manager = self._manager
        manager.attach(ranks.values())
        find = partial(describe, self._vllm_config, self._kv_config, ranks, self._settings)
        entry, setup = join(self._settings, find, ranks, manager)
        self._bridge.announce(entry, setup)

    @accounts.accounted
    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        state = self._manager.state_of(request.request_id)
        state.prompt = request.num_prompt_tokens
        if request.skip_reading_prefix_cache:
            return
        try:
            self._fetch_missing(request.request_id, state)
        except Exception:  # of the cache alone: the request is computed
            swallowed.note(logger, "lookup", "looking for a peer's blocks failed")

    def _fetch_missing(self, req_id: str, state: RequestState) -> None:
        """Begin to read what a peer has of the prompt and we have not."""
        sharing = self._bridge.sharing
        if sharing is None or not sharing.mirror.members():
            return
        wanted = choose(
            self._groups,
            self._manager.counted_group,
            compat.offload_keys_now(self.connector_scheduler, req_id),
            self._is_local,
            sharing.longest,
            sharing.mirror.holds,
        )
        order = None if wanted is None else self._manager.fetching.begin(wanted, state)
        if order is not None and not sharing.fetch(order):
            self._manager.fetching.ended(FetchOutcome.nothing(order, "bridge_gone"))

    def _is_local(self, key: bytes) -> bool:
        """Whether a block is in the index or in the engine's own prefix cache."""
        return key in self._manager.index or compat.in_engine(self._stats.block_pool, key)

    @accounts.accounted
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        state = self._manager.state_of(request.request_id)
        state.engine = num_computed_tokens
        state.loaded = []
        if self._manager.waits_for_fetch(state):  # without looking at every key again
            self._manager.accounts.defer(state)
            return None, False
        matched: tuple[int | None, bool]
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if matched[0] is None:
            self._manager.accounts.defer(state)
        else:
            self._manager.accounts.resume(state)
        return matched

    @accounts.accounted
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens == 0:  # nothing (more) to load: the rest is computed now
            manager = self._manager
            state = manager.state_of(request.request_id)
            manager.fetching.release(state)
            manager.receipts.count(request.request_id, state)
            manager.accounts.price(manager.receipts.totals)

    @accounts.accounted
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        base = super().build_connector_meta(scheduler_output)
        manager, waits = self._manager, {}
        for job_id, job in base.store_jobs.items():
            manager.ledger.open(job_id, job.dst_spec.plan, job.req_id)
        for job_id, job in base.load_jobs.items():
            plan = job.src_spec.plan
            manager.ledger.open(job_id, plan, job.req_id, manager.accounts.clock())
            if plan.waits_for:
                waits[job_id] = plan.waits_for
        manager.fetching.step_begins(scheduler_output.total_num_scheduled_tokens)
        resizes = self._steering.step()
        return XavierConnectorMetadata(
            load_jobs=base.load_jobs,
            store_jobs=base.store_jobs,
            jobs_to_flush=base.jobs_to_flush,
            moves=manager.plan_moves(),
            waits=waits,
            ended=manager.fetching.take_untold(),
            resizes=resizes,
        )

    def has_pending_push_work(self) -> bool:
        return self._steering.wants_step or super().has_pending_push_work()

    @accounts.accounted
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._manager.fetching.step_ends()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, XavierWorkerMetadata):
            self._steering.acknowledge(report)
            for req_id in self._manager.apply(report):
                state = compat.request_state(self.connector_scheduler, req_id)
                if state is not None:
                    compat.store_again(state)
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        with compat.kept_window_progress(self.connector_scheduler):
            done: bool | None = super().reset_cache()
        return done

    @accounts.accounted
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        state = compat.request_state(self.connector_scheduler, request.request_id)
        if state is not None:
            written = max(request.num_prompt_tokens, request.num_tokens - 1)
            compat.clamp_stores(state, written)
            self._manager.retire(request.request_id, compat.offload_keys(state))
        manager, req_id = self._manager, request.request_id
        receipt = manager.receipts.told_at_end(req_id, manager.requests.get(req_id))
        delayed, params = super().request_finished_all_groups(request, block_ids)
        if receipt is not None:
            params = {**(params or {}), **receipt}
        return delayed, params
