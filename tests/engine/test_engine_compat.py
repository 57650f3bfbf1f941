"""Every private symbol of vLLM that we touch is there; differences are seen in its code."""

from __future__ import annotations

import inspect
import re
from collections import deque
from typing import Any

import pytest
from harness import MakeReplica
from shapes import BLOCK, HYBRID, TP2
from test_bytes import prompt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestGroupState,
    RequestOffloadState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.request import Request, RequestStatus

from xinference_xavier.engine import compat
from xinference_xavier.engine.connector import XavierGpuConnector
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.engine.worker import XavierWorker


def names(cls: Any) -> set[str]:
    """Attributes of a class: its own, its fields, and those its methods set."""
    declared = set(dir(cls)) | set(getattr(cls, "__annotations__", ()))
    return declared | set(re.findall(r"self\.(\w+)", inspect.getsource(cls)))


@pytest.mark.parametrize(
    ("cls", "symbols"),
    [
        (OffloadingConnectorScheduler, {"_req_status", "config", "manager"}),
        (RequestOffloadState, {"group_states", "max_offload_tokens", "config"}),
        (RequestGroupState, {"offload_keys", "next_stored_chunk_idx"}),
        (GroupOffloadConfig, {"group_idx", "sliding_window_size_in_chunks"}),
        (OffloadingConnectorWorker, {"worker"}),
        (Scheduler, {"schedule", "_update_requests_with_invalid_blocks", "running"}),
        (Scheduler, {"_inflight_prefills", "connector", "kv_cache_manager"}),
        (Request, {"num_computed_tokens", "num_tokens", "num_prompt_tokens", "status"}),
        (OffloadingConnector, {"connector_scheduler", "connector_worker"}),
        (EngineCoreProc, {"_process_input_queue", "input_queue"}),
        (EngineCoreRequestType, {"WAKEUP"}),
    ],
    ids=lambda value: getattr(value, "__name__", "symbols"),
)
def test_private_symbols_exist(cls: Any, symbols: set[str]) -> None:
    assert symbols <= names(cls)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (XavierGpuConnector, KVConnectorBase_V1),
        (XavierManager, OffloadingManager),
        (XavierWorker, OffloadingWorker),
        (XavierSpec, OffloadingSpec),
    ],
    ids=lambda cls: cls.__name__,
)
def test_every_override_has_something_to_override(ours: type, theirs: type) -> None:
    """A renamed hook of vLLM's would otherwise never be called again, without a word."""
    hooks = {
        "configure", "attach", "state_of", "retire", "plan_moves", "apply", "expect_loads",
        "submit_moves", "take_bad_blocks", "take_failed_requests", "take_report", "publish_to",
        "keys", "waits_for_fetch", "end_fetches", "clear", "resize", "doubt",
    }  # fmt: skip
    optional = set() if compat.REPORTS_FAILED_REQUESTS else {"get_transfer_results"}
    public = {name for name, value in vars(ours).items() if inspect.isfunction(value)}
    public = {name for name in public if not name.startswith("_")}
    base = set(dir(theirs)) | set(dir(OffloadingConnector) if ours is XavierGpuConnector else ())
    assert public - hooks - optional <= base


def test_a_waiting_status_is_known_by_its_name() -> None:
    assert RequestStatus.WAITING_FOR_REMOTE_KVS.name == "WAITING_FOR_REMOTE_KVS"


def test_how_vllm_wants_failed_loads_reported() -> None:
    has_results = hasattr(KVConnectorBase_V1, "get_transfer_results")
    assert has_results == compat.REPORTS_FAILED_REQUESTS


def test_patches_are_applied_once(make_replica: MakeReplica) -> None:
    make_replica(HYBRID)
    schedule = Scheduler.schedule
    update = Scheduler._update_requests_with_invalid_blocks
    assert hasattr(schedule, "xavier")
    assert hasattr(update, "xavier") != compat.REPORTS_FAILED_REQUESTS
    make_replica(HYBRID)
    assert Scheduler.schedule is schedule
    assert Scheduler._update_requests_with_invalid_blocks is update


def test_a_changed_method_of_vllms_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(self: Any, something: Any) -> None: ...

    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    monkeypatch.setattr(Scheduler, "_update_requests_with_invalid_blocks", changed)
    compat.recompute_whole_requests()
    assert Scheduler._update_requests_with_invalid_blocks is changed
    assert "has changed" in caplog.text


def test_window_groups(make_replica: MakeReplica) -> None:
    assert compat.window_groups(make_replica(TP2).connector.connector_scheduler) == set()
    hybrid = make_replica(HYBRID)
    windows = {group for group, spec in enumerate(hybrid.kv_config.kv_cache_groups)
               if hasattr(spec.kv_cache_spec, "sliding_window")
               and spec.kv_cache_spec.sliding_window}  # fmt: skip
    assert compat.window_groups(hybrid.connector.connector_scheduler) == windows
    assert hybrid.manager.counted_group not in windows


def test_keys_the_engine_holds_too(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    replica.answer(prompt(0, 3 * BLOCK))
    pool = replica.scheduler.kv_cache_manager.block_pool
    keys = replica.manager.index.keys()
    assert compat.cached_by_engine(pool, keys) == 3
    replica.forget()
    assert compat.cached_by_engine(pool, keys) == 0
    assert compat.cached_by_engine(pool, [b"x" * 36]) == 0


def test_clamping_only_lowers() -> None:
    class State:
        max_offload_tokens: int | None = None

    state = State()
    compat.clamp_stores(state, 20)  # type: ignore[arg-type]
    assert state.max_offload_tokens == 20
    compat.clamp_stores(state, 30)  # type: ignore[arg-type]
    assert state.max_offload_tokens == 20
    state.max_offload_tokens = 5  # asked for by the request itself
    compat.clamp_stores(state, 20)  # type: ignore[arg-type]
    assert state.max_offload_tokens == 5


class Waiting:
    """Stands in for a request in a queue."""

    def __init__(self, name: str, computed: int, tokens: int, loading: bool = False) -> None:
        self.name, self.num_computed_tokens, self.num_tokens = name, computed, tokens
        remote, waiting = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING
        self.status = remote if loading else waiting


def test_holders_go_first_and_keep_their_order() -> None:
    queue = deque(
        [
            Waiting("a", 0, 90),
            Waiting("b", 40, 60),
            Waiting("c", 0, 10),
            Waiting("d", 76, 79),
            Waiting("e", 0, 30, loading=True),
        ]
    )
    compat._holders_first(queue, idle=False)
    assert [request.name for request in queue] == ["b", "d", "e", "a", "c"]
    compat._holders_first(queue, idle=True)  # nothing runs: who needs least goes first
    assert [request.name for request in queue] == ["d", "b", "e", "a", "c"]
