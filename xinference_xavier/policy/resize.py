"""Changing a tier's number of rows while it is used.

Covers: when rows may come and must go. Does not cover their memory, nor agreeing on the number
(``engine/resizing.py``). Runs on vLLM's scheduler thread, a bounded piece of work in each step.

A tier grows at once. It shrinks in steps: at first rows beyond the new size are given to nobody;
then the snapshots used longest ago leave (for the CPU tier, or for good) until the rest fits; then
what lies beyond the new size moves to rows that stay. Rows in use leave when they are released.
"""

from __future__ import annotations

from xinference_xavier.policy.columns import LEAVING
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.moves import CANDIDATES_PER_STEP, Mover, default_low_water
from xinference_xavier.policy.order import NO_ROW
from xinference_xavier.policy.tier import TierRows
from xinference_xavier.types import Tier

#: Rows looked at in one step, to see which are free: a copy of so many bytes.
ROWS_PER_STEP = 16_384


class Resizer:
    """Changes the tiers of one index.

    Args:
        index: the snapshots.
        moves: demotes what leaves the GPU tier, and moves rows within a tier.
        step_blocks: most blocks that one step fills: the low-water mark follows the GPU tier.
    """

    def __init__(self, index: SnapshotIndex, moves: Mover, step_blocks: int) -> None:
        self._index = index
        self._moves = moves
        self._step_blocks = step_blocks
        self._shrinking: set[Tier] = set()

    @property
    def shrinking(self) -> frozenset[Tier]:
        """Tiers that have yet to reach their size."""
        return frozenset(self._shrinking)

    def rows_of(self, tier: Tier) -> TierRows:
        return self._index.gpu if tier is Tier.GPU else self._index.cpu

    def set_rows(self, tier: Tier, rows: int) -> None:
        """Begin to change a tier that does not shrink now."""
        held = self.rows_of(tier)
        if rows > held.rows:
            held.grow(rows)
        elif rows < held.rows:
            held.shrink(rows)
            self._shrinking.add(tier)
        if tier is Tier.GPU:
            self._moves.low_water = default_low_water(rows, self._step_blocks)

    def step(self) -> None:
        """Let go of what the moves of this step cannot save, and of rows that are free."""
        for tier in tuple(self._shrinking):
            held = self.rows_of(tier)
            self._drop(tier, held)
            if held.drain(ROWS_PER_STEP):
                self._shrinking.discard(tier)

    def _drop(self, tier: Tier, held: TierRows) -> None:
        """Forget the oldest snapshots of what is too much, unless they can be demoted."""
        counters = self._moves.counters
        count = min(held.excess - held.counts[LEAVING], CANDIDATES_PER_STEP)
        if tier is Tier.GPU and self._moves.can_demote():
            return
        for _ in range(count):
            row = self._index.victim(held)
            if row == NO_ROW:
                return
            self._index.evict(held, row)
            if tier is Tier.GPU:
                counters.evictions_gpu += 1
            else:
                counters.evictions_cpu += 1
