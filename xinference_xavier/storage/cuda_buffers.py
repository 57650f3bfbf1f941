"""Buffers that the CUDA copier prepares ahead, so that a copy neither allocates nor waits.

``IndexRing`` carries kernel arguments to the device; ``Staging`` is the bounded device memory that
rows pass through on their way between KV blocks and host rows. Used on the worker's main thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from xinference_xavier.storage.cuda_runtime import Event, Runtime, Stream
from xinference_xavier.storage.jobs import Indexes
from xinference_xavier.storage.slab import Slab

#: Positions per index buffer: a job of more takes several launches.
RING_POSITIONS = 2048
RING_BUFFERS = 32
#: Device memory for rows on their way to and from the host tier, per direction.
STAGING_BYTES = 64 * 1024 * 1024
#: Store staging is used in turns: one piece is gathered while others drain to the host.
STAGING_PIECES = 4


@dataclass
class _Buffer:
    host: torch.Tensor  # page-locked int64 [RING_POSITIONS, 3]
    device: torch.Tensor
    used: Event | None = None


class IndexRing:
    """Page-locked and device buffers for kernel positions, reused once their kernel has run.

    When every buffer is in flight one more is made (the only allocation a copy can cause), so the
    ring grows to what the deepest queue needs and stays there.
    """

    def __init__(self, runtime: Runtime, device: torch.device, buffers: int = RING_BUFFERS) -> None:
        self._runtime = runtime
        self._device = device
        self._buffers = deque(self._make() for _ in range(buffers))
        #: Buffers added because the ring was full.
        self.grown = 0

    def copy_pages(
        self, stream: Stream, blocks: Indexes, groups: Indexes, rows: Indexes, *, to_rows: bool
    ) -> None:
        """Launch page copies on ``stream``: block, KV group and row address per position."""
        for start in range(0, len(blocks), RING_POSITIONS):
            part = slice(start, start + RING_POSITIONS)
            self._launch(stream, np.stack([blocks[part], groups[part], rows[part]], 1), to_rows)

    def _launch(self, stream: Stream, positions: Indexes, to_rows: bool) -> None:
        buffer, count = self._take(), len(positions)
        buffer.host.numpy()[:count] = positions

        def work() -> None:
            buffer.device[:count].copy_(buffer.host[:count], non_blocking=True)
            self._runtime.copy_pages(buffer.device, count, to_rows=to_rows)

        try:
            self._runtime.enqueue(stream, work)
        finally:
            buffer.used = self._runtime.record(stream)
            self._buffers.append(buffer)

    def _take(self) -> _Buffer:
        oldest = self._buffers[0]
        if oldest.used is not None and not self._runtime.done(oldest.used):
            self.grown += 1
            return self._make()
        return self._buffers.popleft()

    def _make(self) -> _Buffer:
        return _Buffer(
            self._runtime.pinned(RING_POSITIONS, 3),
            torch.empty(RING_POSITIONS, 3, dtype=torch.int64, device=self._device),
        )


class Staging:
    """Device rows used in turns, each piece again once the stream that drained it has passed."""

    def __init__(
        self, runtime: Runtime, row_bytes: int, device: torch.device, *, pieces: int
    ) -> None:
        self.piece_rows = max(1, STAGING_BYTES // pieces // row_bytes)
        self._runtime = runtime
        self._slab = Slab(self.piece_rows * pieces, row_bytes, device)
        self._free: list[Event | None] = [None] * pieces
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._slab.nbytes

    def take(self, stream: Stream) -> tuple[int, torch.Tensor]:
        """The next piece, uint8 ``[piece_rows, row_bytes]``; ``stream`` waits until it is free."""
        piece = self._next
        self._next = (piece + 1) % len(self._free)
        free = self._free[piece]
        if free is not None:
            self._runtime.wait(stream, free)
        return piece, self._slab.view(piece * self.piece_rows, self.piece_rows)

    def give_back(self, piece: int, stream: Stream) -> None:
        """The piece is free when ``stream`` has done what it was given so far."""
        self._free[piece] = self._runtime.record(stream)

    def close(self) -> None:
        """Give the memory back."""
        self._slab.close()
