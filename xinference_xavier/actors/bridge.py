"""A replica's link to the cluster: an actor pool on a thread of a busy process.

Covers: the thread, its event loop, the pool with the ``ReplicaActor``, the heartbeat, and starting
to share. Does not cover: what the statistics hold, and sharing itself (``sharing.py``). Started by
the scheduler side of the connector in vLLM's EngineCore process; nothing here ever makes the
calling thread wait, except ``close``, which waits a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import xoscar as xo

from xinference_xavier import swallowed
from xinference_xavier.threads import leave_inherited_core

from .heartbeat import HEARTBEAT_SECONDS, Heartbeat
from .loops import run_and_leave
from .registry import ReplicaEntry, ShareEntry
from .replica import REPLICA_UID, ReplicaActor, StatsCallable, SteerFace
from .sharing import ShareSetup, Sharing
from .tracker import HeartbeatReply

logger = logging.getLogger(__name__)


class Bridge:
    """One replica's link.

    ``identity`` names the replica: ``model_uid``, ``replica`` (its number) and, for display, its
    launch ``options``. ``listen_host`` is the interface on which the pool binds a free port.
    ``tracker_address`` is the supervisor's; None means no heartbeats. ``stats`` runs
    on the bridge's thread, and so does ``steer``, which carries out what operators ask.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        listen_host: str,
        tracker_address: str | None,
        stats: StatsCallable,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        secret: bytes | None = None,
        steer: SteerFace | None = None,
    ) -> None:
        self._identity = dict(identity)
        self._listen_host = listen_host
        self._tracker_address = tracker_address
        self._stats = stats
        self._heartbeat_seconds = heartbeat_seconds
        self._secret = secret
        self._steer = steer
        self._heartbeat: Heartbeat | None = None
        self._share_entry: ShareEntry | None = None
        self._setup: ShareSetup | None = None
        self._sharing: Sharing | None = None
        self._shares: asyncio.Future[None] | None = None
        self._started = time.time()
        self._address: str | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stats_failed = False
        self._thread = threading.Thread(target=self._run, name="xavier-bridge", daemon=True)

    @property
    def address(self) -> str | None:
        """Where the ``ReplicaActor`` listens; None until the pool is up."""
        return self._address

    def start(self) -> None:
        """Start the thread and return at once; failures are logged there."""
        self._thread.start()

    @property
    def sharing(self) -> Sharing | None:
        """The replica among its peers; None until it shares."""
        return self._sharing

    def announce(self, entry: ShareEntry, setup: ShareSetup | None) -> None:
        """How this replica shares, once its ranks have reported; without ``setup`` it does not,
        and ``entry`` says why. Any thread; returns at once."""
        with self._lock:
            self._share_entry, self._setup = entry, setup
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                    self._loop.call_soon_threadsafe(self._share)

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Stop the pool and the thread; harmless when repeated or never started.

        Waits at most ``timeout_seconds``: the thread is a daemon and dies with the process.
        """
        with self._lock:
            self._closed = True
            if self._loop is not None and self._stop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                    self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        leave_inherited_core()
        try:
            run_and_leave(self._serve())
        except Exception:
            logger.warning(
                "This replica's statistics are not available: its actor pool on %s failed. "
                "The cache itself works.",
                self._listen_host,
                exc_info=True,
            )

    async def _serve(self) -> None:
        with self._lock:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            if self._closed:
                return
        self._loop.set_exception_handler(_log_loop_error)
        # Without an internal address no socket file stays behind a kill -9.
        pool = await xo.create_actor_pool(
            f"{self._listen_host}:0", n_process=0, enable_internal_addresses=[False]
        )
        keeping = None
        try:
            actor = await self._make_actor(pool.external_address)
            self._address = pool.external_address
            keeping = asyncio.ensure_future(self._keep(actor))
            await self._beat_until_stopped()
        finally:
            if keeping is not None:
                keeping.cancel()
            if self._shares is not None:
                self._shares.cancel()
            await pool.stop()

    async def _make_actor(self, address: str) -> xo.ActorRefType[ReplicaActor]:
        made: xo.ActorRefType[ReplicaActor] = await xo.create_actor(
            ReplicaActor,
            self._stats,
            lambda: self._sharing,
            self._steer,
            uid=REPLICA_UID,
            address=address,
        )
        return made

    async def _keep(self, actor: xo.ActorRefType[ReplicaActor]) -> None:
        """Make the actor again when it was destroyed: it has no state, and references to it go by
        its name. Else nobody could borrow from this replica or see it until its next launch."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            try:
                if not await xo.has_actor(actor):
                    await self._make_actor(actor.address)
                    logger.warning("This replica's actor was gone and is made again")
            except Exception:
                swallowed.note(logger, "actor", "looking after this replica's actor failed")

    async def _beat_until_stopped(self) -> None:
        assert self._stop is not None
        if self._tracker_address is None:
            await self._stop.wait()
            return
        heartbeat = self._heartbeat = Heartbeat(
            self._tracker_address, self._entry, self._heartbeat_seconds, self._secret, self._hear
        )
        self._share()
        beating = asyncio.ensure_future(heartbeat.run())
        try:
            await self._stop.wait()
        finally:
            beating.cancel()
            await heartbeat.forget()

    def _share(self) -> None:
        """Begin to share, once both the pool and the engine are ready. On the loop."""
        if self._sharing is None and self._setup is not None and self._heartbeat is not None:
            self._sharing = Sharing(self._setup, self._heartbeat)
            self._shares = asyncio.ensure_future(self._run_sharing(self._sharing))
            self._heartbeat.soon()

    async def _run_sharing(self, sharing: Sharing) -> None:
        try:
            await sharing.run()
        except Exception:
            swallowed.note(logger, "sharing", "this replica shares with nobody any more")

    def _hear(self, reply: HeartbeatReply) -> None:
        if self._sharing is not None:
            self._sharing.hear_heartbeat(reply)

    def _entry(self) -> ReplicaEntry:
        return ReplicaEntry(
            model_uid=self._identity["model_uid"],
            replica=self._identity["replica"],
            state="running",
            address=self._address,
            pid=os.getpid(),
            started=self._started,
            options=self._identity.get("options", {}),
            stats=self._read_stats(),
            share=self._share_entry,
        )

    def _read_stats(self) -> dict[str, Any] | None:
        """Statistics for a heartbeat; the first failure in a row is logged."""
        try:
            stats = self._stats()
        except Exception:
            if not self._stats_failed:
                logger.warning("Reading this replica's statistics failed", exc_info=True)
            self._stats_failed = True
            return None
        self._stats_failed = False
        return stats


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Calls given up on fail later, when nobody waits any more: worth a debug line only."""
    logger.debug("In the bridge's event loop: %s", context)
