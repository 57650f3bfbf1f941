"""vLLM's entry point to manager and worker: named by the engine arguments, made in each process."""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from xinference_xavier.budgets import registration_locks_memory
from xinference_xavier.engine.last_words import last_words
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.messages import RankCapacity
from xinference_xavier.engine.settings import EngineSettings
from xinference_xavier.engine.share import RankShare, open_share
from xinference_xavier.engine.sizing import RankBudget, most_rows
from xinference_xavier.engine.worker import XavierWorker
from xinference_xavier.policy.order import order_factory
from xinference_xavier.storage.copier import Copier, create_copier
from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.slab import Slab


class XavierSpec(OffloadingSpec):
    """Makes the manager (scheduler process) or the worker (each rank)."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = EngineSettings.from_extra(config.extra_config)

    def get_manager(self) -> XavierManager:
        return XavierManager(
            ranks=self.config.parallel.world_size,
            block_tokens=self.tokens_per_block,
            order=order_factory(self.settings.options.xavier_policy),
            min_fetch=self.settings.options.xavier_min_fetch,
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> XavierWorker:
        """Allocate this rank's slabs.

        Raises:
            CapacityError: a budget holds no row.
            MemoryError, torch.OutOfMemoryError: a slab cannot be allocated.
        """
        with last_words(self.settings.last_words):
            return self._make_worker(kv_caches)

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> XavierWorker:
        tensors = [cache.tensor for cache in kv_caches.tensors]
        refs = [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in group]
            for group in kv_caches.group_data_refs
        ]
        layout = RowLayout.from_refs(tensors, refs)
        pool_bytes = sum(tensor.shape[0] * tensor.stride(0) for tensor in tensors)
        options = self.settings.options
        budget = RankBudget(
            gpu_bytes=options.xavier_gpu_budget,
            cpu_bytes=options.xavier_cpu_budget,
            ranks=self.config.parallel.world_size,
            local_replicas=self.settings.local_replicas,
        )
        gpu_rows = budget.gpu_rows(layout.row_bytes)
        cpu_rows = budget.cpu_rows(layout.row_bytes, pool_bytes)
        slabs = self._slabs(layout, gpu_rows, cpu_rows)
        most = [0 if slab is None else slab.most_rows for slab in slabs]
        elastic = [slab is not None and slab.elastic for slab in slabs]
        copier = create_copier(
            layout,
            *slabs,
            self_check=options.xavier_self_check,
            seed=self.config.parallel.rank,
            faults=Faults.from_env(self.config.parallel.rank),
        )
        share, problem = self._open_share(slabs, copier)
        # Only now: starting UCX may replace code of libc's that touching memory runs in.
        for slab in slabs:
            if slab is not None:
                slab.touch()
        capacity = RankCapacity(
            *(gpu_rows, cpu_rows, layout.row_bytes, pool_bytes, layout.num_blocks),
            tier=None if share is None else share.address,
            memory=None if share is None else share.memory,
            share_problem=problem,
            most_gpu_rows=most[0],
            most_cpu_rows=most[1],
            elastic=(elastic[0], elastic[1]),
        )
        return XavierWorker(copier, slabs, capacity, share)

    def _open_share(
        self, slabs: tuple[Slab | None, Slab | None], copier: Copier
    ) -> tuple[RankShare | None, str | None]:
        """This rank among its peers, or the sentence why it shares nothing."""
        problem = self.settings.unshared
        if problem is not None:
            return None, problem
        return open_share(*slabs, copier.row_check, Faults.from_env(self.config.parallel.rank))

    def _slabs(
        self, layout: RowLayout, gpu_rows: int, cpu_rows: int
    ) -> tuple[Slab | None, Slab | None]:
        """The device slab and the host slab."""
        pinned, ranks = layout.device.type == "cuda", self.config.parallel.world_size

        def make(rows: int, device: torch.device | str, pinned: bool = False) -> Slab:
            most = most_rows(rows, layout.row_bytes, ranks)
            kind = {"pinned": pinned, "locked": registration_locks_memory()}
            return Slab(rows, layout.row_bytes, device, most_rows=most, **kind)

        gpu = make(gpu_rows, layout.device) if gpu_rows else None
        cpu = make(cpu_rows, "cpu", pinned) if cpu_rows else None
        return gpu, cpu
