"""Where each request's prompt tokens came from: prompt = engine + GPU + CPU + peer + computed.

Every request is counted once, when it is first scheduled to compute: by then its load has ended
and is known to have worked or not. Runs on the scheduler thread; other threads read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

#: Receipts kept for the API.
RECENT = 64

#: Key of a receipt in the ``kv_transfer_params`` of vLLM's outputs.
PARAMS_KEY = "xavier_receipt"

#: Where prompt tokens come from, in the order of a receipt; the last are those of no cache.
SOURCES = ("engine", "gpu", "cpu", "peer", "computed")


class Source(IntEnum):
    """Where a loaded block came from. The first two are ``Tier``'s."""

    GPU = 0
    CPU = 1
    #: Read from a peer for this request.
    PEER = 2


@dataclass(slots=True)
class Receipt:
    """One request's prompt, in tokens by source."""

    request_id: str
    prompt: int
    engine: int
    gpu: int
    cpu: int
    peer: int
    computed: int

    def as_params(self) -> dict[str, Any]:
        """As it leaves the engine, with one of the request's outputs: tokens by source."""
        return {PARAMS_KEY: {source: getattr(self, source) for source in SOURCES}}


@dataclass(slots=True)
class Totals:
    """Sums over all receipts; blocks are those of the model's first full-attention KV group."""

    requests: int = 0
    tokens_prompt: int = 0
    tokens_engine: int = 0
    tokens_gpu: int = 0
    tokens_cpu: int = 0
    tokens_peer: int = 0
    tokens_computed: int = 0
    hits_gpu_blocks: int = 0
    hits_cpu_blocks: int = 0
    hits_peer_blocks: int = 0
    misses_blocks: int = 0


@dataclass(slots=True)
class RequestState:
    """What the manager remembers of a request while vLLM does."""

    #: Sequence number: orders requests by arrival and marks the rows they use.
    mark: int
    prompt: int = 0
    #: Tokens the engine's own prefix cache gave at the last lookup.
    engine: int = 0
    #: Source of each loaded block of the counted group, in prefix order.
    loaded: list[Source] = field(default_factory=list)
    #: The fetch that was started for this request, while it has not pinned the rows itself.
    fetch_id: int | None = None
    fetched_keys: frozenset[bytes] = frozenset()
    #: Since when the lookup is put off (``accounts.Accounts.clock``), while it is.
    deferred_at: float | None = None
    #: KV groups with a block that was not stored.
    broken: set[int] = field(default_factory=set)
    #: Keys whose load failed: a miss for this request from then on, else it would loop.
    failed_keys: set[bytes] = field(default_factory=set)
    #: Some of its blocks were offered for storing.
    offered: bool = False
    #: Once its fate is decided.
    receipt: Receipt | None = None


class Receipts:
    """Counts requests as their fate is decided.

    Args:
        block_tokens: tokens per block of the counted KV group.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.totals = Totals()
        self.recent: deque[Receipt] = deque(maxlen=RECENT)
        #: Receipts that no output has carried yet, by request; None while nobody is told.
        self.untold: dict[str, Receipt] | None = None

    def count(self, req_id: str, state: RequestState) -> None:
        """The request is about to compute the rest of its prompt. Counts it the first time."""
        if state.receipt is not None:
            return
        receipt = state.receipt = self._receipt(req_id, state)
        self.recent.append(receipt)
        if self.untold is not None:
            self.untold[req_id] = receipt
        totals = self.totals
        totals.requests += 1
        totals.tokens_prompt += receipt.prompt
        totals.tokens_engine += receipt.engine
        totals.tokens_gpu += receipt.gpu
        totals.tokens_cpu += receipt.cpu
        totals.tokens_peer += receipt.peer
        totals.tokens_computed += receipt.computed
        hits = len(state.loaded)
        totals.hits_gpu_blocks += state.loaded.count(Source.GPU)
        totals.hits_cpu_blocks += state.loaded.count(Source.CPU)
        totals.hits_peer_blocks += state.loaded.count(Source.PEER)
        known = state.engine // self._block_tokens + hits
        totals.misses_blocks += max(0, state.prompt // self._block_tokens - known)

    def _receipt(self, req_id: str, state: RequestState) -> Receipt:
        """The last prompt token is always computed: vLLM needs its logits."""
        engine = min(state.engine, state.prompt - 1)
        room = state.prompt - 1 - engine
        tokens = dict.fromkeys(Source, 0)
        for source in state.loaded:
            taken = min(self._block_tokens, room)
            tokens[source] += taken
            room -= taken
        return Receipt(
            req_id,
            state.prompt,
            engine,
            gpu=tokens[Source.GPU],
            cpu=tokens[Source.CPU],
            peer=tokens[Source.PEER],
            computed=room + 1,
        )

    def told_at_end(self, req_id: str, state: RequestState | None) -> dict[str, Any] | None:
        """The request ended: its receipt for the last output, or None if there is none to tell."""
        if self.untold is None or state is None or state.receipt is None:
            return None
        self.untold.pop(req_id, None)
        return state.receipt.as_params()

    def as_dict(self) -> dict[str, int]:
        return asdict(self.totals)
