"""What one rank tells its peers about its slabs, and where a location lies in them.

Plain data and index arithmetic; copies nothing and knows neither NIXL nor threads. Used on the
NIXL thread of both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xinference_xavier.storage.jobs import Indexes
from xinference_xavier.storage.slab import Slab
from xinference_xavier.types import Tier

DescriptorTable = npt.NDArray[np.uint64]


class ExtentMemory(NamedTuple):
    """One allocation of a slab, in the address space of the process that owns it."""

    tier: int
    first_row: int
    rows: int
    address: int
    device_id: int
    #: NIXL's name of the kind of memory: ``DRAM`` or ``VRAM``.
    memory_type: str


@dataclass(frozen=True)
class RankMemory:
    """All that a peer must know to read rows of this rank. Picklable plain data.

    ``agent``: the NIXL agent's name, unique to one process and one transport. ``metadata``: its
    holder can read *and write* the slabs, so it is shown in no log. ``row_bytes``: bytes of a row.
    """

    agent: str
    metadata: bytes = field(repr=False)
    row_bytes: int
    extents: tuple[ExtentMemory, ...]


class Transfer(NamedTuple):
    """A part of a read that stays within one memory type on each side."""

    own_type: str
    peer_type: str
    #: int32 ``[n]``: descriptor indexes on our and on the peer's side.
    own: npt.NDArray[np.int32]
    peer: npt.NDArray[np.int32]
    #: int64 ``[n]``: our locations.
    targets: Indexes


def extents_of(device_slab: Slab | None, host_slab: Slab | None) -> tuple[ExtentMemory, ...]:
    """The allocations of both tiers of this process, GPU tier first."""
    found = []
    for tier, slab in ((Tier.GPU, device_slab), (Tier.CPU, host_slab)):
        for extent in slab.extents if slab is not None else ():
            on_device = extent.memory.device.type != "cpu"
            device_id = (extent.memory.device.index or 0) if on_device else 0
            memory_type = "VRAM" if on_device else "DRAM"
            place = (extent.start, extent.rows, extent.address, device_id, memory_type)
            found.append(ExtentMemory(int(tier), *place))
    return tuple(found)


class RowTable:
    """Finds the descriptor of a row: per memory type, one strided descriptor list of all rows.

    Rows of one extent are neighbours in the list, so that NIXL merges runs of them into one piece.
    """

    def __init__(self, extents: Iterable[ExtentMemory], row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._by_tier: dict[int, list[ExtentMemory]] = {}
        self._base: dict[ExtentMemory, int] = {}
        self._by_type: dict[str, list[ExtentMemory]] = {}
        for extent in sorted(extents):
            same = self._by_type.setdefault(extent.memory_type, [])
            self._base[extent] = sum(e.rows for e in same)
            same.append(extent)
            self._by_tier.setdefault(extent.tier, []).append(extent)
        self.memory_types: tuple[str, ...] = tuple(self._by_type)

    def descriptors(self, memory_type: str) -> DescriptorTable:
        """uint64 ``[extents, 5]``: address, row bytes, device id, stride and rows of each."""
        size = self._row_bytes
        rows = [(e.address, size, e.device_id, size, e.rows) for e in self._by_type[memory_type]]
        return np.array(rows, np.uint64)

    def resolve(self, locations: Indexes) -> tuple[Indexes, Indexes]:
        """Index into ``memory_types`` and descriptor index of each location, both int64 ``[n]``.

        Raises:
            IndexError: a location is in no extent.
        """
        kinds = np.full(len(locations), -1, np.int64)
        indexes = np.zeros(len(locations), np.int64)
        for tier, extents in self._by_tier.items():
            rows = locations if tier == Tier.GPU else ~locations
            for extent in extents:
                offset = rows - extent.first_row
                inside = (rows >= 0) & (offset >= 0) & (offset < extent.rows)
                kinds[inside] = self.memory_types.index(extent.memory_type)
                indexes[inside] = self._base[extent] + offset[inside]
        if (kinds < 0).any():
            raise IndexError(f"location {int(locations[kinds < 0][0])} is in no slab of that rank")
        return kinds, indexes


def plan(
    own: RowTable, targets: Indexes, peer: RowTable, sources: Indexes, piece_rows: int
) -> Iterator[Transfer]:
    """Split a read by pair of memory types, and into transfers of at most ``piece_rows`` rows.

    Raises:
        IndexError: a location is in no extent of its side.
    """
    own_kinds, own_indexes = own.resolve(targets)
    peer_kinds, peer_indexes = peer.resolve(sources)
    for o, own_type in enumerate(own.memory_types):
        for p, peer_type in enumerate(peer.memory_types):
            chosen = np.flatnonzero((own_kinds == o) & (peer_kinds == p))
            for start in range(0, len(chosen), piece_rows):
                piece = chosen[start : start + piece_rows]
                left, right = own_indexes[piece], peer_indexes[piece]
                pair = (left.astype(np.int32), right.astype(np.int32))
                yield Transfer(own_type, peer_type, *pair, targets[piece])
