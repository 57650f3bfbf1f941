"""A model without weights: what it writes into a KV slot depends on every token before it.

Each rank of the harness has one. Every slot gets bytes that are unique to the prefix that ends
there, the layer and the rank; before a step ends, every slot that an attention layer would read
must hold exactly those bytes. Blocks handed out with undefined content are scribbled over first,
so that stale bytes that happen to be right cannot hide a missing copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

#: Bytes of one token in one layer: two 64-bit words.
WORDS = 2
VOCABULARY = 250
_MASK = 2**64 - 1
_GARBAGE = np.uint64(0xA5A5_5A5A_DEAD_BEEF)


def _mix(value: int) -> int:
    """Spread every bit of ``value`` (splitmix64's finaliser)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Text:
    """A prompt and its one continuation: token ids, and a digest of the prefix at each."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.digests: list[int] = []

    def _grow(self, length: int) -> None:
        while len(self.digests) < length:
            last = self.digests[-1] if self.digests else 0
            if len(self.digests) == len(self.tokens):
                self.tokens.append(1 + last % VOCABULARY)
            token = self.tokens[len(self.digests)]
            self.digests.append(_mix(last * 31 + token + 1 & _MASK))

    def token(self, position: int) -> int:
        """The token at ``position``; past the prompt, what the model samples there."""
        self._grow(position + 1)
        return self.tokens[position]

    def content(self, start: int, stop: int, salt: int) -> np.ndarray:
        """Slots of positions ``[start, stop)``, uint64 ``[n, WORDS]``; ``salt`` names the layer."""
        self._grow(stop)
        digests = np.array(self.digests[start:stop], np.uint64)[:, None]
        words = np.arange(1, WORDS + 1, dtype=np.uint64) + np.uint64(salt * 64)
        with np.errstate(over="ignore"):
            return (digests + words) * np.uint64(0x9E3779B97F4A7C15) ^ (digests >> np.uint64(7))


@dataclass
class Layer:
    """One attention layer of one rank."""

    name: str
    group: int
    salt: int
    #: uint64 ``[blocks, tokens per block, WORDS]``, sharing memory with the KV cache.
    slots: np.ndarray
    #: Tokens a query sees, itself included; None sees all.
    window: int | None


@dataclass
class Table:
    """What a rank knows of a request."""

    text: Text
    blocks: list[list[int]]
    #: Tokens known so far: prompt and sampled ones.
    known: int


@dataclass
class FakeModel:
    """The layers of one rank, and the block tables of the requests it runs.

    Attributes:
        texts: by request id; shared by all ranks.
        checked: slots compared so far.
    """

    layers: list[Layer]
    block_tokens: int
    texts: dict[str, Text]
    tables: dict[str, Table] = field(default_factory=dict)
    checked: int = 0

    def update_tables(self, output: Any) -> list[tuple[int, list[int]]]:
        """Take over a step's block tables; returns fresh blocks per KV group."""
        fresh: list[tuple[int, list[int]]] = []
        for req_id in output.finished_req_ids:
            self.tables.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            text = self.texts[new.req_id]
            table = Table(text, [list(blocks) for blocks in new.block_ids], new_known(new))
            self.tables[new.req_id] = table
            fresh += self._beyond(table, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            table, blocks = self.tables[req_id], cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                table.blocks = [list(group) for group in blocks]
                table.known = len(cached.all_token_ids[req_id])
                fresh += self._beyond(table, cached.num_computed_tokens[index])
            elif blocks is not None:
                for group, added in enumerate(blocks):
                    table.blocks[group].extend(added)
                    fresh.append((group, list(added)))
        return fresh

    def _beyond(self, table: Table, computed: int) -> list[tuple[int, list[int]]]:
        first = -(-computed // self.block_tokens)
        return [(group, blocks[first:]) for group, blocks in enumerate(table.blocks)]

    def scribble(self, blocks: Sequence[int]) -> None:
        """Make the content of these blocks undefined, in all layers: a block has one owner."""
        for layer in self.layers:
            layer.slots[[block for block in blocks if block]] = _GARBAGE

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Compute a step; returns the tokens sampled per request.

        All slots are written before any is read, as a layer does for its batch.
        """
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, count in output.num_scheduled_tokens.items():
            self._write(self.tables[req_id], computed[req_id], computed[req_id] + count)
        sampled = {}
        for req_id, count in output.num_scheduled_tokens.items():
            table, stop = self.tables[req_id], computed[req_id] + count
            self._check(req_id, table, computed[req_id], stop)
            sampled[req_id] = [table.text.token(stop)] if stop == table.known else []
            table.known += len(sampled[req_id])
        return sampled

    def _write(self, table: Table, start: int, stop: int) -> None:
        for layer in self.layers:
            blocks, slots = self._slots(table.blocks[layer.group], start, stop)
            layer.slots[blocks, slots] = table.text.content(start, stop, layer.salt)

    def _slots(self, blocks: list[int], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, stop)
        return np.array(blocks)[positions // self.block_tokens], positions % self.block_tokens

    def _check(self, req_id: str, table: Table, start: int, stop: int) -> None:
        """Every slot that queries ``[start, stop)`` attend to."""
        for layer in self.layers:
            first = 0 if layer.window is None else max(0, start - layer.window + 1)
            blocks, slots = self._slots(table.blocks[layer.group], first, stop)
            wrong = np.flatnonzero(
                (layer.slots[blocks, slots] != table.text.content(first, stop, layer.salt)).any(1)
            )
            self.checked += stop - first
            assert not len(wrong), (
                f"{req_id}: layer {layer.name} reads wrong bytes at positions "
                f"{(wrong + first).tolist()}, blocks {sorted(set(blocks[wrong].tolist()))}, while "
                f"computing [{start}, {stop})"
            )


def new_known(new: Any) -> int:
    """Tokens of a request that a rank sees for the first time."""
    return len(new.prefill_token_ids or new.prompt_token_ids)


def as_slots(view: torch.Tensor, block_tokens: int) -> np.ndarray:
    """A KV cache ``[blocks, 1, tokens, floats]`` as uint64 ``[blocks, tokens, WORDS]``."""
    slots = view.numpy().view(np.uint64)[:, 0]
    assert slots.shape[1:] == (block_tokens, WORDS)
    return slots
