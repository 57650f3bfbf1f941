"""Where a prompt's blocks lie: vLLM's hashes of its tokens, looked up everywhere.

Covers: keys from token ids, and counting by source. Does not cover tokens from text (``host``).
Runs on the bridge's thread and only reads, block by block: an answer may mix two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xinference_xavier.engine import compat
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.policy.index import Found
from xinference_xavier.types import Tier, tier_of

#: The names of ``Prompts.find`` beside the prefix; their counts add up to the prompt's tokens.
SOURCES = ("engine", "gpu", "cpu", "peer", "not_cached")


class Prompts:
    """Looks prompts up.

    Args:
        manager: knows this replica's snapshots.
        hash_keys: the keys of each KV group of token ids, under a salt.
        block_pool: vLLM's own, once there is one.
        at_peer: whether a peer that can be read from seems to hold a key.
    """

    def __init__(
        self,
        manager: XavierManager,
        hash_keys: Callable[[Sequence[int], str | None], list[list[bytes]]],
        block_pool: Callable[[], Any],
        at_peer: Callable[[bytes], bool],
    ) -> None:
        self._manager = manager
        self._hash_keys = hash_keys
        self._block_pool = block_pool
        self._at_peer = at_peer

    def find(self, tokens: Sequence[int], cache_salt: str | None = None) -> dict[str, int]:
        """Tokens by source, of the model's first full-attention KV group, and ``prefix``: those
        from the start without a gap. What fills no block is not cached."""
        group = self._manager.counted_group
        size = self._manager.block_tokens[group]
        counts = dict.fromkeys(SOURCES, 0)
        prefix, whole = 0, True
        for key in self._hash_keys(tokens, cache_salt)[group]:
            source = self._source(key)
            counts[source] += size
            whole = whole and source != "not_cached"
            prefix += size if whole else 0
        counts["not_cached"] += len(tokens) - sum(counts.values())
        return {**counts, "prefix": prefix}

    def _source(self, key: bytes) -> str:
        if compat.in_engine(self._block_pool(), key):
            return "engine"
        index = self._manager.index
        with self._manager.lock:  # a tier that shrinks has fewer rows from one moment to the next
            if index.lookup(key) is Found.HIT:
                return "gpu" if tier_of(index.where(key)) is Tier.GPU else "cpu"
        return "peer" if self._at_peer(key) else "not_cached"
