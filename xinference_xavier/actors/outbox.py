"""Sending one replica what the others hold, without ever waiting for it.

Covers: one queue and one task per replica, bounded. Does not cover what is sent
(``policy/directory.py``). What is dropped here leaves a gap in the numbers, by which the receiver
knows to ask for the whole. Runs on the event loop of Xinference's supervisor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import xoscar as xo

from .reach import reach
from .replica import REPLICA_UID, ReplicaActor

logger = logging.getLogger(__name__)

#: Batches that may wait for one replica: 64 batches are 32,768 keys.
LIMIT = 64
#: Batches in one call.
PER_CALL = 8
#: How long a call may take. A stopped replica accepts and never answers.
CALL_SECONDS = 3.0


class Outbox:
    """Batches on their way to the replica at ``address``, which knows ``token``."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._token = token
        self._waiting: deque[Any] = deque(maxlen=LIMIT)
        self._task: asyncio.Task[None] | None = None
        self._ref: xo.ActorRefType[ReplicaActor] | None = None

    def put(self, batch: Any) -> None:
        """Queue one batch; the oldest is dropped when the replica is far behind."""
        self._waiting.append(batch)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._send())

    def close(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _send(self) -> None:
        try:
            if self._ref is None:
                self._ref = await xo.wait_for(reach(REPLICA_UID, self.address), CALL_SECONDS)
            while self._waiting:
                taken = min(PER_CALL, len(self._waiting))
                batches = [self._waiting.popleft() for _ in range(taken)]
                await xo.wait_for(self._ref.hear(self._token, batches), CALL_SECONDS)
        except Exception as error:
            logger.debug("Telling the replica at %s failed: %r", self.address, error)
            self._ref = None
            self._waiting.clear()
