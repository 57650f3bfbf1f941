"""Showing a replica in the tracker while its engine still loads.

Covers: the heartbeat of a model process from the start of loading to its end. Does not cover: the
replica's own heartbeat, which takes the place over once its engine runs (``actors/bridge.py``).
Started and stopped from the loading threads; runs on the model actor's event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future
from typing import Any

from xinference_xavier.actors.heartbeat import Heartbeat
from xinference_xavier.actors.registry import ReplicaEntry
from xinference_xavier.host.identity import Identity


class StartingNotice:
    """A replica's entry in state ``starting``. Does nothing without a loop or a supervisor."""

    def __init__(
        self,
        identity: Identity,
        options: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._loop = loop
        self._running: Future[None] | None = None
        self._entry = ReplicaEntry(
            model_uid=identity.model_uid,
            replica=identity.replica,
            state="starting",
            address=None,
            pid=os.getpid(),
            started=time.time(),
            options=options,
            stats=None,
            share=None,
        )
        self._heartbeat = (
            None
            if loop is None or identity.supervisor_address is None
            else Heartbeat(identity.supervisor_address, lambda: self._entry)
        )

    def start(self) -> None:
        if self._loop is not None and self._heartbeat is not None:
            self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def stop(self) -> None:
        """Take the notice back. A running engine's own entry is younger and stays."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        assert self._heartbeat is not None
        try:
            await self._heartbeat.run()
        finally:
            await self._heartbeat.forget()
