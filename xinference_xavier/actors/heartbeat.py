"""Telling the tracker, again and again, that a replica is there.

Covers: sending one entry every few seconds through tracker deaths and returns, with one log line
per outage. Does not cover: what the entry says (the caller's). Runs on whichever event loop the
caller has: the bridge's in EngineCore, Xinference's own in a model process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable

import xoscar as xo

from .registry import ReplicaEntry
from .tracker import HeartbeatReply, TrackerActor, find_tracker, get_or_create_tracker

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
#: How long one call to the tracker may take. A stopped supervisor accepts and never answers.
CALL_SECONDS = 5.0
#: How long saying goodbye may take; an entry nobody removes expires by itself.
FORGET_SECONDS = 0.3


class NoTrackerError(RuntimeError):
    """The supervisor answers and has no tracker."""


class Heartbeat:
    """Sends ``entry()`` to the tracker at ``tracker_address`` until cancelled.

    ``secret`` is the cluster's, offered to a tracker that came back empty. ``hear`` gets each
    reply; whatever it raises counts as a failed heartbeat.
    """

    def __init__(
        self,
        tracker_address: str,
        entry: Callable[[], ReplicaEntry],
        interval_seconds: float = HEARTBEAT_SECONDS,
        secret: bytes | None = None,
        hear: Callable[[HeartbeatReply], None] = lambda reply: None,
    ) -> None:
        self._tracker_address = tracker_address
        self._secret = secret
        self._hear = hear
        self._entry = entry
        self._interval_seconds = interval_seconds
        self._tracker: xo.ActorRefType[TrackerActor] | None = None
        self._had_tracker = False
        self._failing = False
        self._soon = asyncio.Event()

    @property
    def tracker(self) -> xo.ActorRefType[TrackerActor] | None:
        """The tracker, while it answers."""
        return self._tracker

    async def run(self) -> None:
        """Beat until cancelled; failures are logged and never raised."""
        while True:
            self._soon.clear()
            await self._beat_once()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._soon.wait(), self._interval_seconds)

    def soon(self) -> None:
        """Beat at once: there is news. On the event loop."""
        self._soon.set()

    async def forget(self) -> None:
        """Take the entry back, if the tracker answers at once."""
        if self._tracker is None:
            return
        entry = self._entry()
        goodbye = self._tracker.forget(entry["model_uid"], entry["replica"], entry["started"])
        with contextlib.suppress(Exception):
            await xo.wait_for(goodbye, FORGET_SECONDS)

    async def _beat_once(self) -> None:
        try:
            if self._tracker is None:
                self._tracker = await xo.wait_for(self._reach(), CALL_SECONDS)
            beat = self._tracker.heartbeat(self._entry(), self._secret)
            self._hear(pickle.loads(await xo.wait_for(beat, CALL_SECONDS)))
        except Exception as error:
            self._tracker = None
            self._log_failure(error)
        else:
            if self._failing:
                logger.info("The tracker at %s answers again", self._tracker_address)
            self._failing = False

    async def _reach(self) -> xo.ActorRefType[TrackerActor]:
        tracker = await find_tracker(self._tracker_address)
        if tracker is None and self._had_tracker:
            tracker = await get_or_create_tracker(self._tracker_address)
        if tracker is None:
            raise NoTrackerError("xinference-xavier is not installed there, or switched off")
        self._had_tracker = True
        return tracker

    def _log_failure(self, error: Exception) -> None:
        """Warn about the first failure of an outage only."""
        if self._failing:
            return
        self._failing = True
        logger.warning(
            "No heartbeat to the tracker at %s (%s: %s). The model serves on without being shown "
            "there; this is tried again every %g s.",
            self._tracker_address,
            type(error).__name__,
            error,
            self._interval_seconds,
        )
