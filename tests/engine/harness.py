"""One replica without a model: vLLM's real scheduler and KV cache manager, and N ranks.

Every decision is vLLM's own: chunked prefill, preemption, prefix caching, bad blocks, resets. Real
scheduler-side and worker-side connectors, real KV tensors in RAM, real slabs and copies; messages
are pickled on their way, as between processes, and the ranks' outputs go through vLLM's own
aggregator. The model is ``fake_model``, the speed of copies and acknowledgements ``gated_copier``.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from fake_model import FakeModel, Layer, Text, as_slots
from gated_copier import GatedCopier
from shapes import BLOCK, Shape, allocate, engine_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from xinference_xavier.engine import connector as connector_module
from xinference_xavier.engine import spec as spec_module
from xinference_xavier.engine.connector import XavierGpuConnector
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.storage import copier as copier_module


class SilentBridge:
    """Stands in for the actor pool, which has tests of its own and takes 50 ms to start."""

    sharing = None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def start(self) -> None: ...

    def announce(self, *args: Any) -> None: ...

    def close(self) -> None: ...


@dataclass
class Rank:
    """One worker process."""

    number: int
    config: VllmConfig
    connector: XavierGpuConnector
    model: FakeModel
    copier: GatedCopier

    def execute(self, message: bytes) -> bytes:
        """One step, in the order of vLLM's model runner."""
        output = pickle.loads(message)
        self.connector.handle_preemptions(output.kv_connector_metadata)
        for _, blocks in self.model.update_tables(output):
            self.model.scribble(blocks)
        with self._as_this_process(), set_forward_context(None, self.config):
            if not output.total_num_scheduled_tokens:
                result = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
                return pickle.dumps(result)
            transfer = KVConnectorModelRunnerMixin._get_kv_connector_output(output)
            with transfer as kv_output:
                sampled = self.model.forward(output)
        req_ids = list(sampled)
        return pickle.dumps(
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
                sampled_token_ids=list(sampled.values()),
                kv_connector_output=kv_output,
            )
        )

    @contextmanager
    def _as_this_process(self) -> Iterator[None]:
        with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector):
            yield


@dataclass
class Asked:
    """A request, as its client sees it."""

    prompt: list[int]
    max_tokens: int
    text: Text
    answer: list[int] = field(default_factory=list)
    finished: str | None = None
    #: Prompt tokens that were in the KV cache when it was first scheduled.
    cached: int | None = None
    #: Receipts that came with its outputs, by the output's number.
    told: dict[int, dict[str, int]] = field(default_factory=dict)
    outputs: int = 0


class Replica:
    """Drives scheduler and ranks step by step, in one thread."""

    def __init__(self, shape: Shape, model: Path) -> None:
        self.shape = shape
        configs = [engine_config(shape, model, rank) for rank in range(shape.ranks)]
        self.config = configs[0]
        specs = [shape.specs(rank) for rank in range(shape.ranks)]
        kv_configs = get_kv_cache_configs(self.config, specs, [2**30] * shape.ranks)
        self.kv_config = generate_scheduler_kv_cache_config(kv_configs)
        for config in configs:
            config.cache_config.num_gpu_blocks = self.kv_config.num_blocks
        self.texts: dict[str, Text] = {}
        self.ranks = [
            self._make_rank(number, config, kv)
            for number, (config, kv) in enumerate(zip(configs, kv_configs, strict=True))
        ]
        block_size, hash_block_size = resolve_kv_cache_block_sizes(self.kv_config, self.config)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(hash_block_size, hash_fn)
        bridge = SilentBridge if shape.tracker is None else connector_module.Bridge
        with mock.patch.object(connector_module, "Bridge", bridge):
            self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
                vllm_config=self.config,
                kv_cache_config=self.kv_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=True,
            )
        self.connector: XavierGpuConnector = self.scheduler.connector
        self.aggregator = KVOutputAggregator.from_connector(self.connector, shape.ranks)
        metadata = {
            (rank.number // shape.tensor_parallel, rank.number % shape.tensor_parallel): (
                pickle.loads(pickle.dumps(rank.connector.get_handshake_metadata()))
            )
            for rank in self.ranks
        }
        self.connector.set_xfer_handshake_metadata_pp_aware(metadata)
        self.asked: dict[str, Asked] = {}
        self.requests: list[Request] = []
        self._in_flight: deque[tuple[Any, bytes, list[bytes | None]]] = deque()

    def _make_rank(self, number: int, config: VllmConfig, kv_config: Any) -> Rank:
        def gated(*args: Any, **kwargs: Any) -> GatedCopier:
            return GatedCopier(copier_module.create_copier(*args, **kwargs))

        views = allocate(kv_config)
        with mock.patch.object(spec_module, "create_copier", gated):
            connector = KVConnectorFactory.create_connector(
                config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
            )
            connector.register_kv_caches(views)
        layers = [
            Layer(name, group, hash_of(name, number), as_slots(views[name], BLOCK), window_of(spec))
            for group, kv_group in enumerate(kv_config.kv_cache_groups)
            for name in kv_group.layer_names
            for spec in (kv_group.kv_cache_spec,)
        ]
        model = FakeModel(layers, BLOCK, self.texts)
        copier = connector.connector_worker.worker.copier
        copier.scribble = model.scribble
        return Rank(number, config, connector, model, copier)

    # -- what clients do ---------------------------------------------------------------------

    def ask(self, prompt: Sequence[int], max_tokens: int = 1) -> str:
        """Send a request; returns its id."""
        req_id = f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        request = Request(
            request_id=req_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.requests.append(request)
        self.texts[req_id] = Text(prompt)
        self.asked[req_id] = Asked(list(prompt), max_tokens, self.texts[req_id])
        self.scheduler.add_request(request)
        return req_id

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        if self.asked[req_id].finished is None:
            self.asked[req_id].finished = "abort"

    def reset(self, preempt: bool = False) -> None:
        """vLLM's reset of its own prefix cache and of the connector's."""
        self.scheduler.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True)

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that only ours can hit."""
        assert self.scheduler.reset_prefix_cache()

    # -- steps -------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        return self.config.max_concurrent_batches

    def step(self, abort_late: Sequence[str] = ()) -> None:
        """Schedule a step, and process the oldest one once ``depth`` are in flight.

        Args:
            abort_late: requests aborted while the step ran.
        """
        if self.scheduler.has_requests() and len(self._in_flight) < self.depth:
            output = self.scheduler.schedule()
            self._note_scheduled(output)
            message = pickle.dumps(output)
            results: list[bytes | None] = [None] * len(self.ranks)
            last = len(self.ranks) - 1
            for rank in self.ranks:
                # A later pipeline stage runs a step after the earlier ones have gone on.
                if self.shape.pipeline_parallel == 1 or rank.number < last:
                    results[rank.number] = rank.execute(message)
            self._in_flight.append((output, message, results))
            if len(self._in_flight) < self.depth and output.total_num_scheduled_tokens:
                return
        if self._in_flight:
            self._process(*self._in_flight.popleft(), abort_late)

    def _process(
        self, output: Any, message: bytes, results: list[bytes | None], aborted: Sequence[str]
    ) -> None:
        for rank in self.ranks:
            if results[rank.number] is None:
                results[rank.number] = rank.execute(message)
        last = len(self.ranks) - 1 if self.shape.pipeline_parallel > 1 else 0
        outputs = [pickle.loads(result) for result in results if result is not None]
        combined = self.aggregator.aggregate(outputs, output_rank=last)
        for req_id in aborted:
            self.abort(req_id)
        for client in self.scheduler.update_from_output(output, combined).values():
            for answer in client.outputs:
                asked = self.asked[answer.request_id]
                asked.answer += answer.new_token_ids
                if answer.kv_transfer_params is not None:
                    (asked.told[asked.outputs],) = answer.kv_transfer_params.values()
                asked.outputs += 1
                if answer.finish_reason is not None:
                    asked.finished = str(answer.finish_reason)

    def _note_scheduled(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            asked = self.asked[new.req_id]
            if asked.cached is None:
                asked.cached = min(new.num_computed_tokens, len(asked.prompt))

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests()

    def run(self, limit: int = 400) -> None:
        """Step until nothing is left to do, with all gates open."""
        for rank in self.ranks:
            rank.copier.gate.open()
        for _ in range(limit):
            if not self.busy:
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps: {self.scheduler.requests}")

    def answer(self, prompt: Sequence[int], max_tokens: int = 1) -> Asked:
        """Ask and run until nothing is left to do."""
        asked = self.asked[self.ask(prompt, max_tokens)]
        self.run()
        return asked

    # -- what tests look at ------------------------------------------------------------------

    @property
    def manager(self) -> XavierManager:
        return self.connector._manager

    def moves_in_flight(self) -> int:
        """Demotions and promotions that a rank has yet to acknowledge; they count down from -1."""
        return sum(1 for job_id in self.manager.ledger._jobs if job_id < 0)

    @property
    def counters(self) -> Any:
        return self.manager.planner.counters

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()


def hash_of(layer: str, rank: int) -> int:
    """A number for a layer of a rank: no two hold the same bytes."""
    return int(layer.split(".")[2]) * 8 + rank + 1


def window_of(spec: KVCacheSpec) -> int | None:
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


MakeReplica = Callable[[Shape], Replica]
