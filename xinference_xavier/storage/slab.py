"""A slab: the memory that holds the rows of one tier of one rank.

A slab is a list of extents, each an allocation of its own. Row numbers are stable; runs and views
never cross an extent. Made and closed on the worker's main thread; its bytes are written by the
copier alone.

A slab whose budget may change has more address space than rows: only the pages of its rows are
backed by memory. So it grows and shrinks without a new address or registration that peers would
have to learn; a peer that reads a row that is gone reads zeros, and knows by its lost lease.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from xinference_xavier.storage import hostmem
from xinference_xavier.storage.layout import ROW_ALIGNMENT_BYTES
from xinference_xavier.types import CapacityError

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Extent:
    """Rows ``[start, start + rows)`` of a slab in one allocation, uint8 ``[rows, row_bytes]``."""

    start: int
    rows: int
    memory: torch.Tensor

    @property
    def address(self) -> int:
        """Address of the first byte, in the address space of the slab's device."""
        return int(self.memory.data_ptr())


class Slab:
    """One tier of one rank: ``rows`` rows of ``row_bytes`` bytes, and address space for
    ``most_rows``.

    On the CPU the memory is anonymous and populated in the background (``touch``); with ``pinned``
    it is registered with CUDA at once. On a CUDA device it is one ordinary allocation there.
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        device: torch.device | str,
        *,
        pinned: bool = False,
        huge_pages: bool = True,
        most_rows: int = 0,
        locked: bool = False,
    ) -> None:
        """Allocate the slab, with address space for ``most_rows`` rows where it is to be had.

        Only plain host memory has more of it than ``rows``: CUDA backs what it allocates or pins.
        ``locked``: it will be registered with a device that reads pages where they were then, so
        none is given back either.

        Raises:
            ValueError: no rows, or a row size that is not a positive multiple of 8.
            CapacityError: the memory is not to be had.
        """
        if rows < 1:
            raise ValueError(f"a slab needs at least one row, got {rows}")
        if row_bytes < 1 or row_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(f"row_bytes must be a multiple of 8 above 0, got {row_bytes}")
        self.row_bytes = row_bytes
        self.device = torch.device(device)
        self.pinned = pinned and self.device.type == "cpu"
        #: Whether memory is given back when rows go.
        self.elastic = self.device.type == "cpu" and not self.pinned and not locked
        self.rows = rows
        most = max(rows, most_rows) if self.elastic else rows
        memory = _reserve(rows, most, row_bytes, self.device, huge_pages=huge_pages)
        most = memory.numel() // row_bytes
        if self.pinned:
            hostmem.pin(memory)
        self._extents: list[Extent] = [Extent(0, most, memory.view(most, row_bytes))]
        self._populators: list[hostmem.Populator] = []

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The allocations, by their first row."""
        return tuple(self._extents)

    @property
    def most_rows(self) -> int:
        """Rows in all extents: what ``resize`` may ask for."""
        return sum(extent.rows for extent in self._extents)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    def view(self, first: int, count: int) -> torch.Tensor:
        """Rows ``[first, first + count)`` as uint8 ``[count, row_bytes]``, sharing memory.

        Raises:
            IndexError: the rows do not lie in one extent.
        """
        for extent in self._extents:
            offset = first - extent.start
            if offset >= 0 and count >= 0 and offset + count <= extent.rows:
                return extent.memory[offset : offset + count]
        raise IndexError(f"rows [{first}, {first + count}) do not lie in one extent of the slab")

    def extent_of(self, rows: Rows) -> Rows:
        """Index of the extent of each row.

        Raises:
            IndexError: a row is in no extent.
        """
        if not self._extents:
            raise IndexError("the slab has no extents: it is closed")
        starts = np.array([extent.start for extent in self._extents], np.int64)
        counts = np.array([extent.rows for extent in self._extents], np.int64)
        which = np.searchsorted(starts, rows, side="right") - 1
        outside = (
            (which < 0) | (rows - starts[which] >= counts[which]) if len(starts) else rows >= 0
        )
        if np.any(outside):
            raise IndexError(
                f"row {int(rows[outside][0])} is outside a slab of {self.most_rows} rows"
            )
        return which.astype(np.int64, copy=False)

    def runs(self, rows: Rows) -> Iterator[tuple[int, int]]:
        """Cut ``rows`` into ``(first, count)`` runs of ascending neighbours inside one extent."""
        if not len(rows):
            return
        which = self.extent_of(rows)
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(which) != 0)) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        for start, stop in pairwise(bounds):
            yield int(rows[start]), stop - start

    def touch(self) -> None:
        """Start backing the memory with pages in the background; returns at once."""
        if self.elastic and not self._populators:
            self._populators = [hostmem.Populator(self._part(0, self.rows))]

    def resize(self, rows: int) -> hostmem.Populator | None:
        """Back ``rows`` rows with memory, and no others; returns at once with what does it in the
        background, or None where nothing is to be done.

        ``rows`` is at most ``most_rows``. No job and no peer may use rows from there on, nor those
        that are new before it has ended.
        """
        old, self.rows = self.rows, rows
        if not self.elastic or rows == old:
            return None
        part = self._part(min(old, rows), max(old, rows))
        for populator in self._populators:
            populator.stop()
        task = hostmem.Populator(part, release=rows < old, after=tuple(self._populators))
        self._populators = [task]
        return task

    def _part(self, start: int, stop: int) -> torch.Tensor:
        return self._extents[0].memory.view(-1)[start * self.row_bytes : stop * self.row_bytes]

    def wait_touched(self, timeout_seconds: float | None = None) -> bool:
        """Wait for what ``touch`` started; whether it ended in time."""
        return all(populator.join(timeout_seconds) for populator in self._populators)

    @property
    def touched_bytes(self) -> int:
        """Bytes populated so far by what ``touch`` started."""
        return sum(populator.populated_bytes for populator in self._populators)

    def close(self) -> None:
        """Give the memory back once no view of it is left. Idempotent; the copier closes first."""
        for populator in self._populators:
            populator.close()
        self._populators = []
        extents, self._extents = self._extents, []
        if self.pinned:
            for extent in extents:
                hostmem.unpin(extent.memory.view(-1))


def _reserve(
    rows: int, most_rows: int, row_bytes: int, device: torch.device, *, huge_pages: bool
) -> torch.Tensor:
    """Address space for ``most_rows``, or for ``rows`` where that much is refused."""
    if most_rows > rows:
        try:
            return _allocate(most_rows * row_bytes, device, huge_pages=huge_pages)
        except CapacityError as exc:
            logger.info("xavier: no address space to grow a budget while running: %s", exc)
    return _allocate(rows * row_bytes, device, huge_pages=huge_pages)


def _allocate(nbytes: int, device: torch.device, *, huge_pages: bool) -> torch.Tensor:
    if device.type == "cpu":
        return hostmem.anonymous_bytes(nbytes, huge_pages=huge_pages)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as exc:
        raise CapacityError(
            f"{device} cannot hold a GPU tier of {nbytes} bytes; lower xavier_gpu_budget or "
            "gpu_memory_utilization"
        ) from exc
