"""The one sampler of an API process: the newest view, its history and what happened.

Covers: asking on a schedule, forgetting what is old, telling listeners. Does not cover: asking
(``view.py``), what is kept of an answer (``history.py``), which changes are events
(``events.py``). Runs on the event loop of Xinference's API process, as does every reader: nothing
here takes a lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from xinference_xavier.host.events import Event, changes
from xinference_xavier.host.history import Past, Point, Sample
from xinference_xavier.host.view import ModelView

__all__ = ["Event", "Point", "Sample", "Sampler"]

logger = logging.getLogger(__name__)

#: Most events kept.
MOST_EVENTS = 500


class View(Protocol):
    """What the sampler asks: ``ClusterView``."""

    def models(self) -> Awaitable[list[ModelView]]: ...


class Sampler:
    """Asks ``view`` every ``interval_seconds``, however many look at it.

    Args:
        view: gathers what replicas say.
        interval_seconds: between two questions.
        keep_seconds: how far the history of a model reaches back at most.
    """

    def __init__(
        self, view: View, interval_seconds: float = 2.0, keep_seconds: float = 3600.0
    ) -> None:
        self._view = view
        self._keep_seconds = keep_seconds
        self.interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None
        self._listeners: list[tuple[Callable[[Sample], object], Callable[[], object]]] = []
        self._pasts: dict[str, Past] = {}
        self._silent = False
        self._failures = 0
        #: The newest sample; None before the first.
        self.latest: Sample | None = None
        #: What happened, the oldest first.
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        #: Questions asked, and those that ended in an error.
        self.polls = 0
        self.errors = 0

    def history(self, model_uid: str) -> Sequence[Point]:
        """The model's points, the oldest first; empty for a model never seen."""
        past = self._pasts.get(model_uid)
        return () if past is None else tuple(past.points)

    def add_listener(
        self,
        listener: Callable[[Sample], object],
        on_error: Callable[[], object] = lambda: None,
    ) -> Callable[[], None]:
        """Call ``listener`` with each new sample, or ``on_error`` when nobody could be asked.

        Both on the event loop, where they must be quick. One that raises is logged, and called
        again next time. Returns what removes them.
        """
        pair = (listener, on_error)
        self._listeners.append(pair)
        return lambda: self._listeners.remove(pair) if pair in self._listeners else None

    def start(self) -> None:
        """Begin to ask, on the running event loop. A second call changes nothing."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="xavier-sampler")

    def stop(self) -> None:
        """Ask no more; a question that is under way is dropped."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                await self.poll()
            except Exception:  # ours alone: the server goes on
                self._failures += 1
                if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
                    text = "The cache's sampler has failed (%d so far)"
                    logger.warning(text, self._failures, exc_info=True)
            due = max(due + self.interval_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def poll(self) -> None:
        """Ask once and keep the answer. ``start`` calls this on schedule."""
        self.polls += 1
        try:
            models = await self._view.models()
        except Exception as error:
            self._note_silence(error)
            for _, on_error in tuple(self._listeners):
                _call(on_error)
            return
        sample = Sample(time.time(), time.monotonic(), models)
        if self._silent:
            self._silent = False
            text = "The supervisor answers again."
            self.events.append(Event(sample.at, "", None, "answering", text))
        self._keep(sample)
        for listener, _ in tuple(self._listeners):
            _call(listener, sample)

    def _keep(self, sample: Sample) -> None:
        before, self.latest = self.latest, sample
        if before is not None:
            self.events.extend(changes(before.models, sample.models, sample.at))
        for model in sample.models:
            self._pasts.setdefault(model.model_uid, Past()).add(sample, model)
        oldest = sample.monotonic - self._keep_seconds
        for uid, past in list(self._pasts.items()):
            while past.points and past.points[0].monotonic < oldest:
                past.points.popleft()
            if not past.points:
                del self._pasts[uid]

    def _note_silence(self, error: Exception) -> None:
        """Count an error; the first of a row is an event."""
        self.errors += 1
        if not self._silent:
            self._silent = True
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = f"The supervisor does not answer ({reason}). Numbers stay as they were."
            self.events.append(Event(time.time(), "", None, "not_answering", text))


def _call(listener: Callable[..., object], *args: object) -> None:
    try:
        listener(*args)
    except Exception:
        logger.warning("A listener of the cache's sampler failed", exc_info=True)
