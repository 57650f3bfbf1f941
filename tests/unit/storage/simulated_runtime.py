"""A CUDA that cannot exist here: streams and events that run in adversarial orders on the CPU.

Work given to a stream stays queued until somebody asks whether an event is done; then queued work
of all streams runs in a random order that respects only stream order and event waits. A missing
wait therefore shows as wrong bytes for some seed. Page copies are plain memmoves from the same
address table that the kernel would read.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from xinference_xavier.storage.layout import RowLayout


@dataclass(eq=False)
class SimulatedEvent:
    happened: bool = False


@dataclass(eq=False)
class SimulatedStream:
    #: Work to run, or an event to wait for.
    queue: deque[Callable[[], None] | SimulatedEvent] = field(default_factory=deque)


class SimulatedRuntime:
    """``cuda_runtime.Runtime`` without a device."""

    def __init__(self, layout: RowLayout, seed: int) -> None:
        self._layout = layout
        self._random = random.Random(seed)
        self._streams: list[SimulatedStream] = []
        self._compute = self.stream()
        self.host_waits = 0

    def stream(self) -> SimulatedStream:
        self._streams.append(SimulatedStream())
        return self._streams[-1]

    def current(self) -> SimulatedStream:
        return self._compute

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        event = SimulatedEvent()
        stream.queue.append(lambda: setattr(event, "happened", True))
        return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        stream.queue.append(event)

    def enqueue(self, stream: SimulatedStream, work: Callable[[], None]) -> None:
        stream.queue.append(work)

    def done(self, event: SimulatedEvent) -> bool:
        for _ in range(self._random.randrange(4)):
            self._step()
        return event.happened

    def synchronize(self, event: SimulatedEvent) -> None:
        self.host_waits += 1
        while not event.happened:
            assert self._step(), "streams wait for each other for ever"

    def seconds(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        assert start.happened
        assert end.happened
        return 0.001

    def copy_pages(self, positions: torch.Tensor, count: int, *, to_rows: bool) -> None:
        for block, group, row in positions[:count].tolist():
            for index, offset, nbytes in self._layout.groups[group]:
                tensor = self._layout.tensors[index]
                page = tensor.data_ptr() + block * tensor.stride(0)
                target, source = (row + offset, page) if to_rows else (page, row + offset)
                ctypes.memmove(target, source, nbytes)

    def pinned(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.int64)

    def drain(self) -> None:
        """Run all that is queued."""
        while self._step():
            pass
        assert not any(stream.queue for stream in self._streams), "a stream waits for ever"

    def _step(self) -> bool:
        """Run one runnable piece of work; whether there was one."""
        ready = [s for s in self._streams if s.queue and self._runnable(s.queue[0])]
        if not ready:
            return False
        work = self._random.choice(ready).queue.popleft()
        if not isinstance(work, SimulatedEvent):
            work()
        return True

    @staticmethod
    def _runnable(work: Callable[[], None] | SimulatedEvent) -> bool:
        return not isinstance(work, SimulatedEvent) or work.happened
