"""Streams, events and launches: all that the CUDA copier asks of CUDA, behind one small boundary.

The copier's logic (what waits for what, which buffer may be used again) is written against
``Runtime`` and tested with a simulated one that runs streams in adversarial orders; ``CudaRuntime``
is the real thing. Streams and events are opaque to the copier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from xinference_xavier.storage.layout import RowLayout

Stream = Any
Event = Any


class Runtime(Protocol):
    """Streams that run work in order, and events that order work across streams."""

    def stream(self) -> Stream:
        """A new stream."""

    def current(self) -> Stream:
        """The stream on which the model computes."""

    def record(self, stream: Stream) -> Event:
        """An event that is done when what ``stream`` was given so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Hold what ``stream`` is given from now on until ``event`` is done."""

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Give ``stream`` asynchronous work."""

    def done(self, event: Event) -> bool:
        """Whether the event is done; raises if the device has failed."""

    def synchronize(self, event: Event) -> None:
        """Block the host until the event is done."""

    def seconds(self, start: Event, end: Event) -> float:
        """Seconds between two events that are done."""

    def copy_pages(self, positions: torch.Tensor, count: int, *, to_rows: bool) -> None:
        """Move pages on the stream of the enclosing ``enqueue``; see ``kernels``."""

    def pinned(self, rows: int, columns: int) -> torch.Tensor:
        """Page-locked host memory, int64 ``[rows, columns]``."""


class CudaRuntime:
    """The CUDA device of a layout."""

    def __init__(self, layout: RowLayout) -> None:
        from xinference_xavier.storage.kernels import PageCopier

        self._device = layout.device
        self._page_copier = PageCopier(layout)
        self._page_copier.warm_up(layout.row_bytes)
        torch.cuda.synchronize(self._device)  # the one wait, while nothing runs yet

    def stream(self) -> Stream:
        """A new stream on the device."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Stream:
        """torch's current stream on the device."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> Event:
        """A CUDA event; with timing, for ``seconds``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """A wait on the device; the host goes on."""
        stream.wait_event(event)

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Run ``work``, which launches and copies asynchronously, with ``stream`` current."""
        with torch.cuda.stream(stream):
            work()

    def done(self, event: Event) -> bool:
        """A query, never a synchronisation."""
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """Used when closing only."""
        event.synchronize()

    def seconds(self, start: Event, end: Event) -> float:
        """Device time, from milliseconds."""
        return float(start.elapsed_time(end)) * 1e-3

    def copy_pages(self, positions: torch.Tensor, count: int, *, to_rows: bool) -> None:
        """One Triton launch."""
        self._page_copier(positions, count, to_rows=to_rows)

    def pinned(self, rows: int, columns: int) -> torch.Tensor:
        """From torch's pinned allocator."""
        return torch.empty(rows, columns, dtype=torch.int64, pin_memory=True)
