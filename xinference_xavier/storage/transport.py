"""Reads rows out of peers' slabs with one-sided NIXL reads: a rank's door to the other replicas.

Covers: the thread that NIXL lives on, and the calls from other threads. Does not cover leases (what
may be read, for how long) or whom to ask. Made in each vLLM worker process; one thread
``xavier-nixl`` makes every NIXL call, sleeps while nothing is in flight, and runs on any core.
Nothing is waited for on the caller's thread but in ``__init__`` and ``close``.

Found with NIXL 1.5.1 and UCX, whose environment is left alone: by default processes of one host
read each other's memory directly (CMA, as with ``UCX_TLS=tcp,sm,self``). Such a read does not
involve the owner, even a stopped one, and blocks the thread until its last byte is there, so reads
of one rank queue. Across PID or IPC namespaces and between hosts without RDMA UCX falls back to
tcp, several times slower, where the owner's UCX answers: there a stopped owner delivers later, and
a reader that dies or closes in the middle of a read can abort the *owner's* process (UCX: "Fatal:
unexpected error: Endpoint timeout"). Registering memory touches no page of it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np

from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.jobs import Indexes
from xinference_xavier.storage.nixl_agent import nixl_problem
from xinference_xavier.storage.peer_reader import Arrived, PeerReader, Read, pending
from xinference_xavier.storage.rank_memory import RankMemory, extents_of
from xinference_xavier.storage.slab import Slab
from xinference_xavier.threads import leave_inherited_core
from xinference_xavier.types import TransferError

__all__ = ["RankMemory", "Read", "Transport", "nixl_problem"]

logger = logging.getLogger(__name__)

#: Starting UCX takes about half a second, two with cold files.
START_SECONDS = 30.0

_Command = Callable[[PeerReader], None]


class Transport:
    """The slabs of one rank, readable by peers, and reads from peers' slabs into them.

    All methods may be called on any thread and none but ``__init__`` raises. The slabs must stay
    open until ``close`` has returned.
    """

    def __init__(
        self, device_slab: Slab | None, host_slab: Slab | None, *, faults: Faults | None = None
    ) -> None:
        """Start NIXL and register the slabs; ``faults`` strikes reads as kind ``fetch``.

        Raises:
            TransferError: NIXL is missing or fails, or there is no slab; nothing is left running.
        """
        slabs = [slab for slab in (device_slab, host_slab) if slab is not None]
        sizes = {slab.row_bytes for slab in slabs}
        if len(sizes) != 1:
            raise TransferError(f"the slabs of a rank need one row size, got {sorted(sizes)}")
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._close_seconds = 0.0
        #: Keeps the memory mapped for as long as the agent may write to it.
        self._memories = [extent.memory for slab in slabs for extent in slab.extents]
        started: Future[RankMemory] = Future()
        make = _maker(device_slab, host_slab, sizes.pop(), faults)
        self._thread = threading.Thread(
            target=self._run, args=(make, started), name="xavier-nixl", daemon=True
        )
        self._thread.start()
        try:
            self._memory = started.result(START_SECONDS)
        except FutureTimeoutError as exc:
            self.close(0.0)
            raise TransferError(f"NIXL did not start within {START_SECONDS:g} seconds") from exc

    def memory(self) -> RankMemory:
        """What peers need to read from here. A secret: it lets its holder write, too."""
        return self._memory

    def connect(self, peer: RankMemory) -> Future[None]:
        """Make the peer known and the connection warm. Idempotent while the peer lives.

        The future raises ``TransferError``: dead peer, no answer, other row size, closed.
        """
        future: Future[None] = pending()
        if not self._submit(lambda reader: reader.connect(peer, future)):
            future.set_exception(TransferError("the transport is closed"))
        return future

    def read(
        self,
        peer: RankMemory,
        sources: Indexes,
        targets: Indexes,
        timeout_seconds: float,
        arrived: Arrived = lambda targets: None,
    ) -> Read:
        """Read the peer's rows ``sources`` into our rows ``targets``, both int64 ``[n]`` locations.

        ``arrived`` is told on the NIXL thread of rows as their bytes arrive, before the read ends.
        Errors arrive in the futures of the result. The time limit includes waiting for other reads
        and is not looked at while NIXL copies between two processes of one host.
        """
        read, deadline = Read(), time.monotonic() + timeout_seconds
        if len(sources) != len(targets):
            text = f"a read of {len(sources)} rows into {len(targets)}"
            read.fail(TransferError(text))
            return read
        pair = (np.array(sources, np.int64), np.array(targets, np.int64))
        if not self._submit(lambda reader: reader.read(peer.agent, *pair, deadline, read, arrived)):
            read.fail(TransferError("the transport is closed"))
        return read

    def disconnect(self, agent: str) -> None:
        """The peer is gone: refuse reads from it. Those in flight end by themselves."""
        self._submit(lambda reader: reader.disconnect(agent))

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Stop NIXL. Every future ends, and when this returns in time no byte lands any more.

        Reads in flight get half of the time to end, those that timed out before do not. Idempotent.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_seconds = timeout_seconds / 2
                self._commands.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning("xavier: NIXL did not stop within %g seconds", timeout_seconds)
        else:
            self._memories = []

    def _submit(self, command: _Command) -> bool:
        with self._lock:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    def _run(self, make: Callable[[], PeerReader], started: Future[RankMemory]) -> None:
        leave_inherited_core()
        try:
            reader = make()
        except Exception as exc:
            started.set_exception(exc)
            return
        started.set_result(reader.memory)
        try:
            while self._serve(reader):
                pass
        except Exception:
            logger.exception("xavier: the NIXL thread failed; this rank reads no more")
        self._end(reader)

    def _end(self, reader: PeerReader) -> None:
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + self._close_seconds
        while reader.hopeful and time.monotonic() < deadline:
            time.sleep(reader.poll_seconds() or 0.0)
            reader.poll()
        reader.close()
        while not self._commands.empty():  # only after a failure: nothing follows a close
            command = self._commands.get()
            if command is not None:
                command(reader)

    def _serve(self, reader: PeerReader) -> bool:
        """Run the next command, if one comes before the next look at reads; False at the end."""
        try:
            command = self._commands.get(timeout=reader.poll_seconds())
        except queue.Empty:
            reader.poll()
            return True
        if command is not None:
            command(reader)
            reader.poll()
        return command is not None


def _maker(
    device_slab: Slab | None, host_slab: Slab | None, row_bytes: int, faults: Faults | None
) -> Callable[[], PeerReader]:
    """Makes the reader on the NIXL thread, where its device must be current too."""
    name = f"xavier-{uuid.uuid4().hex}"
    extents = extents_of(device_slab, host_slab)

    def make() -> PeerReader:
        if device_slab is not None and device_slab.device.type == "cuda":
            import torch

            torch.cuda.set_device(device_slab.device)
        return PeerReader(name, extents, row_bytes, faults)

    return make
