"""From locations to memory: which allocation and row a location names, and which copies coalesce.

Pure index arithmetic on numpy arrays; copies nothing. Used by every copier, on its own thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from xinference_xavier.storage.jobs import Indexes
from xinference_xavier.storage.slab import Slab
from xinference_xavier.types import Tier


class Run(NamedTuple):
    """Positions ``[start, stop)`` of two index arrays that both advance by constant steps."""

    start: int
    stop: int
    left: slice
    right: slice


class RowMap:
    """The extents of both tiers of one rank as one flat list of memories."""

    def __init__(self, device_slab: Slab | None, host_slab: Slab | None) -> None:
        self._slabs = ((Tier.GPU, device_slab), (Tier.CPU, host_slab))
        extents = [e for _, slab in self._slabs if slab is not None for e in slab.extents]
        #: Per memory, uint8 ``[rows, row_bytes]``.
        self.memories: tuple[torch.Tensor, ...] = tuple(extent.memory for extent in extents)
        self._starts = np.array([extent.start for extent in extents], np.int64)
        #: The first so many memories are on the device, the rest on the host.
        self.device_memories = len(device_slab.extents) if device_slab is not None else 0
        self._addresses = np.array([extent.address for extent in extents], np.int64)
        self._row_bytes = int(extents[0].memory.shape[1]) if extents else 0

    def resolve(self, locations: Indexes) -> tuple[Indexes, Indexes]:
        """Memory index and row inside that memory of each location, both int64 ``[n]``.

        Raises:
            IndexError: a location is in no extent, or in a tier that is switched off.
        """
        memory = np.empty(len(locations), np.int64)
        rows = np.where(locations >= 0, locations, ~locations)
        first = 0
        for tier, slab in self._slabs:
            mine = (locations >= 0) == (tier is Tier.GPU)
            if mine.any():
                if slab is None:
                    raise IndexError(
                        f"location {int(locations[mine][0])} is in the {tier.name} tier, "
                        "which is switched off"
                    )
                memory[mine] = first + slab.extent_of(rows[mine])
            first += len(slab.extents) if slab is not None else 0
        return memory, rows - self._starts[memory]

    def addresses(self, memory: Indexes, rows: Indexes) -> Indexes:
        """Address of the first byte of rows that ``resolve`` has found."""
        first: Indexes = self._addresses[memory]
        return first + rows * self._row_bytes


def row_addresses(rows: torch.Tensor, count: int) -> Indexes:
    """Address of each of the first ``count`` rows of ``rows``, uint8 ``[>= count, row_bytes]``."""
    steps: Indexes = np.arange(count, dtype=np.int64) * int(rows.stride(0))
    return steps + int(rows.data_ptr())


def runs(left: Indexes, right: Indexes, pairs: Indexes, *, adjacent: bool) -> Iterator[Run]:
    """Cut positions into the fewest runs, greedily, in order.

    A run stays within one value of ``pairs`` (the memories involved) and both index arrays advance
    by a constant step, of either sign; with ``adjacent`` by exactly 1, so that rows are one piece.
    vLLM hands out freed blocks in descending order, so negative steps are as common as positive.
    """
    a, b, pair = left.tolist(), right.tolist(), pairs.tolist()
    start, count = 0, len(a)
    while start < count:
        stop = start + 1
        step_a = step_b = 1
        if stop < count and pair[stop] == pair[start]:
            step_a, step_b = a[stop] - a[start], b[stop] - b[start]
            joins = (step_a, step_b) == (1, 1) if adjacent else step_a != 0 and step_b != 0
            if joins:
                while (
                    stop < count
                    and pair[stop] == pair[start]
                    and a[stop] - a[stop - 1] == step_a
                    and b[stop] - b[stop - 1] == step_b
                ):
                    stop += 1
            else:
                step_a = step_b = 1
        length = stop - start
        yield Run(start, stop, _span(a[start], step_a, length), _span(b[start], step_b, length))
        start = stop


def _span(first: int, step: int, count: int) -> slice:
    end = first + step * count
    return slice(first, end if end >= 0 else None, step)
