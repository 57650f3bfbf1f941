"""vLLM from 0.27 to 0.32: every private symbol we touch, and every difference we bridge.

Differences are found by looking at the installed code, not at version numbers.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import RequestStatus

from xinference_xavier.engine.fetching import Group

logger = logging.getLogger(__name__)

#: 0.28 and later: a worker names the requests whose load failed, whatever the KV groups.
REPORTS_FAILED_REQUESTS = hasattr(KVConnectorBase_V1, "get_transfer_results")


def request_state(scheduler: OffloadingConnectorScheduler, req_id: str) -> Any | None:
    """vLLM's offloading state of a request (``RequestOffloadState``), or None."""
    return scheduler._req_status.get(req_id)


def offload_keys(state: RequestOffloadState) -> list[list[bytes]]:
    """The request's keys per KV group, in prefix order."""
    return [list(group.offload_keys) for group in state.group_states]


def offload_keys_now(scheduler: OffloadingConnectorScheduler, req_id: str) -> list[list[bytes]]:
    """The same for a request that vLLM has just announced and not looked up yet."""
    state = scheduler._req_status[req_id]
    state.update_offload_keys()
    return offload_keys(state)


def groups(
    scheduler: OffloadingConnectorScheduler, block_tokens: Sequence[int]
) -> tuple[Group, ...]:
    """What ``fetching.choose`` needs of each KV group."""
    windows = {
        group.group_idx: group.sliding_window_size_in_chunks
        for group in scheduler.config.kv_group_configs
    }
    return tuple(Group(tokens, windows[i]) for i, tokens in enumerate(block_tokens))


def in_engine(block_pool: Any, key: bytes) -> bool:
    """Whether the engine's own prefix cache holds a block, by our key."""
    return block_pool is not None and key in block_pool.cached_block_hash_to_block._cache


def clamp_stores(state: RequestOffloadState, tokens: int) -> None:
    """Offer no block beyond ``tokens`` tokens for storing.

    0.27 also offers the block of the last sampled token, whose slot was never written.
    """
    current = state.max_offload_tokens
    state.max_offload_tokens = tokens if current is None else min(current, tokens)


def store_again(state: RequestOffloadState) -> None:
    """Offer all the request's blocks for storing again: what failed to load is computed anew."""
    for group in state.group_states:
        group.next_stored_chunk_idx = 0


@contextmanager
def kept_window_progress(scheduler: OffloadingConnectorScheduler) -> Iterator[None]:
    """Keep a reset from offering blocks again that have left a sliding window.

    vLLM's ``reset_cache`` offers every block of a running request once more, although those behind
    the window were freed and may belong to another request by now.
    """
    windows = window_groups(scheduler)
    progress = [
        (group, group.next_stored_chunk_idx)
        for state in scheduler._req_status.values()
        for config, group in zip(state.config.kv_group_configs, state.group_states, strict=True)
        if config.group_idx in windows
    ]
    yield
    for group, next_chunk in progress:
        group.next_stored_chunk_idx = next_chunk


def window_groups(scheduler: OffloadingConnectorScheduler) -> frozenset[int]:
    """KV groups with a sliding window or a state instead of full attention."""
    return frozenset(
        group.group_idx
        for group in scheduler.config.kv_group_configs
        if group.sliding_window_size_in_chunks is not None
    )


def cached_by_engine(block_pool: Any, keys: Container[bytes]) -> int:
    """How many of ``keys`` the engine's own prefix cache holds too. Safe from other threads.

    Walks the engine's blocks, of which there are fewer than snapshots.
    """
    cached = tuple(block_pool.cached_block_hash_to_block._cache)  # copied in one piece
    return sum(1 for key in cached if key in keys)


def prompt_hasher(
    vllm_config: Any, kv_cache_config: Any, scheduler: OffloadingConnectorScheduler
) -> Callable[[Sequence[int], str | None], list[list[bytes]]]:
    """Keys of each KV group for token ids and a salt, as a request of that prompt has them.

    For the process of the scheduler: the seed of its hashes is a global of vLLM's.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.request import Request

    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    hasher = get_request_block_hasher(hash_block_size, hash_fn)

    def hash_keys(tokens: Sequence[int], cache_salt: str | None = None) -> list[list[bytes]]:
        request = Request(
            request_id="xavier-lookup",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=cache_salt,
            block_hasher=hasher,
        )
        hashes = request.block_hashes
        return [
            [
                make_offload_key(block_hash, group.group_idx)
                for block_hash in islice(
                    hashes, group.hashes_per_chunk - 1, None, group.hashes_per_chunk
                )
            ]
            for group in scheduler.config.kv_group_configs
        ]

    return hash_keys


class _Engine:
    """The engine of this process, once it has looked for requests; None without one of its own."""

    ref: Callable[[], Any] = staticmethod(lambda: None)


def watch_for_wakes() -> None:
    """Let ``wake`` find the engine's queue of requests: vLLM's connectors are not given it."""
    from vllm.v1.engine.core import EngineCoreProc

    original = getattr(EngineCoreProc, "_process_input_queue", None)
    if original is None or hasattr(original, "xavier"):
        return

    @functools.wraps(original)
    def process_input_queue(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _Engine.ref() is not self:
            _Engine.ref = staticmethod(weakref.ref(self))
        return original(self, *args, **kwargs)

    process_input_queue.xavier = True  # type: ignore[attr-defined]
    EngineCoreProc._process_input_queue = process_input_queue


def wake() -> None:
    """Make an engine that waits for a request ask its connector whether to step. Any thread.

    Without an engine process, or with a vLLM that cannot be woken, the next request does it.
    """
    from vllm.v1.engine import EngineCoreRequestType

    queue = getattr(_Engine.ref(), "input_queue", None)
    request = getattr(EngineCoreRequestType, "WAKEUP", None)
    if queue is not None and request is not None:
        queue.put_nowait((request, None))


def serve_block_holders_first() -> None:
    """Let no request that holds KV blocks wait behind one that finds none.

    vLLM goes through its waiting requests in order and stops at the first that cannot get blocks.
    Up to 0.27 a request whose load has ended may stand behind it, and later versions leave one
    whose load has failed in front: once nothing runs, nothing ever does again. Also takes back the
    blocks reserved for a request whose load has failed, which count against its next load. First
    come, first served only: under the priority policy vLLM's own order stays.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.schedule
    if hasattr(original, "xavier"):
        return

    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("skipped_waiting", "kv_holding_waiting"):
            _holders_first(getattr(self, name, None), idle=not self.running)
        prefills: set[Any] = getattr(self, "_inflight_prefills", set())
        for request in [request for request in prefills if not _holds_blocks(request)]:
            prefills.discard(request)
        return original(self, *args, **kwargs)

    schedule.xavier = True  # type: ignore[attr-defined]
    Scheduler.schedule = schedule


def _holds_blocks(request: Any) -> bool:
    """Whether a request that does not run has KV blocks. A failed load's are freed when it ends."""
    return bool(
        request.num_computed_tokens > 0 or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    )


def _holders_first(queue: Any, idle: bool) -> None:
    """Sort a queue of waiting requests in place, keeping the order otherwise.

    While nothing runs (``idle``), among the holders the one that needs least goes first: vLLM may
    have let in more loads than can be completed at once.
    """
    if not isinstance(queue, deque) or len(queue) < 2:
        return

    def rank(request: Any) -> tuple[bool, int]:
        if not _holds_blocks(request):
            return True, 0
        return False, request.num_tokens - request.num_computed_tokens if idle else 0

    ordered = sorted(queue, key=rank)
    if any(a is not b for a, b in zip(queue, ordered, strict=True)):
        queue.clear()
        queue.extend(ordered)


def recompute_whole_requests() -> None:
    """Let a failed load of a model with several KV groups be recomputed.

    0.27's handling of bad blocks unpacks exactly one KV group and would end the engine. With
    several, a request with a bad block starts over, as later versions do. Loads are asynchronous
    here, so running requests never hold a bad block. Does nothing where vLLM reports failed
    requests, and where its method has another form (then 0.27's own handling stays).
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = getattr(Scheduler, "_update_requests_with_invalid_blocks", None)
    if REPORTS_FAILED_REQUESTS or original is None or hasattr(original, "xavier"):
        return
    parameters = list(inspect.signature(original).parameters)
    if parameters[:3] != ["self", "requests", "invalid_block_ids"]:
        logger.warning("xavier: vLLM's %s has changed; failed loads stay its own", original)
        return

    def start_over(
        self: Any, requests: Iterable[Any], invalid_block_ids: set[int], *args: Any, **kwargs: Any
    ) -> tuple[set[str], int, set[int]]:
        if len(self.kv_cache_config.kv_cache_groups) == 1:
            found: tuple[set[str], int, set[int]]
            found = original(self, requests, invalid_block_ids, *args, **kwargs)
            return found
        affected, tokens = set(), 0
        for request in requests:
            groups = self.kv_cache_manager.get_block_ids(request.request_id)
            if any(not invalid_block_ids.isdisjoint(blocks) for blocks in groups):
                affected.add(request.request_id)
                tokens += request.num_computed_tokens
                request.num_computed_tokens = 0
        return affected, tokens, set()

    start_over.xavier = True  # type: ignore[attr-defined]
    Scheduler._update_requests_with_invalid_blocks = start_over
