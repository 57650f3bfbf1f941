"""One rank's tiers, for the replica's own engine: reading rows out of a peer's slabs.

Covers: the actor and the thread with its event loop and pool. Does not cover the transfer
(``storage/transport.py``) or which rows (the engine). In each worker process, beside the forward
pass, which never waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import xoscar as xo

from xinference_xavier.storage.gates import Gates
from xinference_xavier.storage.row_check import Checksums, RowCheck
from xinference_xavier.threads import leave_inherited_core
from xinference_xavier.types import TransferError

from .loops import run_and_leave

logger = logging.getLogger(__name__)

#: How long starting the pool may hold up the start of the engine.
START_SECONDS = 20.0


class TierAddress(NamedTuple):
    """Where a rank's actor listens. ``uid`` cannot be guessed: knowing it is the permission."""

    address: str
    uid: str


class FetchResult(NamedTuple):
    """How one rank's fetch ended: ``status`` is "ok", "failed" (nothing can land any more) or
    "late" (timed out; bytes may still land)."""

    status: str
    seconds: float = 0.0
    error: str = ""


class Reader(Protocol):
    """What the actor needs of ``storage.transport.Transport``."""

    def connect(self, peer: Any) -> Any: ...

    def read(
        self,
        peer: Any,
        sources: Any,
        targets: Any,
        timeout_seconds: float,
        arrived: Callable[[Any], None],
    ) -> Any: ...

    def disconnect(self, agent: str) -> None: ...


class TierActor(xo.StatelessActor):
    """Reads rows of peers on behalf of the replica's own bridge."""

    def __init__(self, reader: Reader, gates: Gates, rows: RowCheck) -> None:
        """``rows``: checksums of this rank's rows."""
        super().__init__()
        self._reader = reader
        self._gates = gates
        self._rows = rows
        self._memories: dict[str, Any] = {}
        self._reads: dict[int, Any] = {}

    async def meet(self, memory: Any) -> None:
        """Connect to a peer's rank. Raises ``TransferError``."""
        self._memories[memory.agent] = memory
        await asyncio.wrap_future(self._reader.connect(memory))

    def part(self, agent: str) -> None:
        """The peer is gone."""
        if self._memories.pop(agent, None) is not None:
            self._reader.disconnect(agent)

    async def fetch(
        self, fetch_id: int, agent: str, sources: bytes, targets: bytes, timeout_seconds: float
    ) -> FetchResult:
        """Read rows: ``sources`` at the peer into ``targets`` here, both int64 locations."""
        memory = self._memories.get(agent)
        if memory is None:
            return FetchResult("failed", error="this rank is not connected to that peer")
        if self._gates.is_over(fetch_id):  # the order was late: its rows may be in use again
            return FetchResult("failed", error="the fetch had ended before it began here")
        pair = (np.frombuffer(sources, np.int64), np.frombuffer(targets, np.int64))
        self._rows.forget(pair[1])
        # Known from the start: when the bridge gives up, this call is cancelled, the read is not.
        arrived = functools.partial(self._gates.arrive, fetch_id)
        read = self._reads[fetch_id] = self._reader.read(memory, *pair, timeout_seconds, arrived)
        status, seconds, text = "ok", 0.0, ""
        try:
            seconds = await asyncio.wrap_future(read.done)
        except TransferError as error:
            status, text = "failed" if read.settled.done() else "late", str(error)
        if status != "late":
            del self._reads[fetch_id]
        return FetchResult(status, seconds, text)

    def checksums(self, locations: bytes) -> Checksums | None:
        """What this rank knows of its rows, int64 locations; None while it checks nothing."""
        return self._rows.tell(np.frombuffer(locations, np.int64))

    async def verify(self, locations: bytes, told: Checksums | None) -> list[int]:
        """Positions of rows, int64 locations, that are not what the peer's rank ``told`` of.

        They have to be rows of a fetch that has not been settled: nobody else writes them.
        """
        if told is None:
            return []
        # A checksum takes several times as long as a copy: the loop serves others meanwhile.
        return await asyncio.to_thread(self._rows.wrong, np.frombuffer(locations, np.int64), told)

    def settle(self, fetch_id: int, lost: list[int] | None) -> None:
        """The fetch is over for all ranks: ``lost`` locations hold nothing (None: all of them)."""
        self._gates.settle(fetch_id, None if lost is None else frozenset(lost))

    async def landed(self, fetch_id: int) -> None:
        """Return once nothing of a late fetch can land any more."""
        if not self._gates.is_over(fetch_id):
            self._gates.settle(fetch_id, None)
        read = self._reads.get(fetch_id)
        if read is None:
            return
        await asyncio.wait([asyncio.wrap_future(read.settled)])
        self._reads.pop(fetch_id, None)


class TierServer:
    """The actor's thread, loop and pool in one worker process."""

    def __init__(self, reader: Reader, gates: Gates, rows: RowCheck) -> None:
        self._parts = (reader, gates, rows)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._address: TierAddress | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="xavier-tier", daemon=True)

    def start(self) -> TierAddress:
        """Start and return where the actor listens: loopback, like all of a replica's ranks.

        Raises:
            TransferError: the pool did not start.
        """
        self._thread.start()
        self._ready.wait(START_SECONDS)
        if self._address is None:
            raise TransferError(f"the actor pool of this rank did not start ({self._error!r})")
        return self._address

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Stop; waits a bounded time. The thread is a daemon and dies with the process."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        leave_inherited_core()
        try:
            run_and_leave(self._serve())
        except Exception as error:
            self._error = error
            logger.warning("The actor pool of this rank failed", exc_info=True)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        # Without an internal address no socket file stays behind a kill -9.
        pool = await xo.create_actor_pool(
            "127.0.0.1:0", n_process=0, enable_internal_addresses=[False]
        )
        try:
            uid = f"xinference_xavier_tier_{secrets.token_hex(16)}"
            await xo.create_actor(TierActor, *self._parts, uid=uid, address=pool.external_address)
            self._address = TierAddress(pool.external_address, uid)
            self._ready.set()
            await self._stop.wait()
        finally:
            await pool.stop()
