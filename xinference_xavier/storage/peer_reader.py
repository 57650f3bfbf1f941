"""The state of all reads from peers: connections, transfers in flight, transfers gone silent.

Covers: which transfer belongs to which read, when a read has ended, and when no byte of it can
land any more. Does not cover threads (``transport``) or NIXL's calls (``nixl_agent``). Everything
runs on the NIXL thread and nothing here raises: outcomes arrive in futures.

A transfer that timed out may still land while its peer lives (a stopped process that continues):
NIXL can neither cancel it nor fence it off. So its handle is kept and asked until it is done, the
peer is gone, or the agent is destroyed; only then the read is *settled*.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.jobs import NO_INDEXES, Indexes
from xinference_xavier.storage.nixl_agent import NixlAgent
from xinference_xavier.storage.rank_memory import ExtentMemory, RankMemory, RowTable, plan
from xinference_xavier.types import TransferError

#: A first contact takes 10-60 ms, with a busy peer a few hundred.
CONNECT_SECONDS = 5.0
#: A read is split into transfers of about this size, so that what has arrived can be used while
#: the rest is on its way; larger ones are no faster.
PIECE_BYTES = 32 * 1024 * 1024
#: The time between two looks at a read is this share of its age, within limits: young ones end
#: soon, silent ones need no hurry.
_POLL_SHARE = 0.02
_POLL_SECONDS = (0.0002, 0.005)


#: Told of our rows, int64 ``[n]`` locations, whose bytes have arrived.
Arrived = Callable[[Indexes], None]


def pending() -> Future:
    """A future that its receiver cannot cancel: what it stands for cannot be cancelled either."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True)
class Read:
    """A read under way.

    ``done``: the seconds that it took, without waiting for others; raises ``TransferError`` when
    it failed or timed out. ``settled``: no byte of it can land any more. Set before ``done``,
    except after a time-out: then when the peer has answered or is gone, or the transport closed.
    """

    done: Future[float] = field(default_factory=pending)
    settled: Future[None] = field(default_factory=pending)

    def fail(self, error: Exception) -> None:
        """End as failed, with nothing in flight."""
        self.settled.set_result(None)
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(eq=False)
class _Flight:
    """The transfers of one read that may still land bytes."""

    read: Read
    peer: _Peer
    began: float
    deadline: float
    arrived: Arrived = lambda targets: None
    #: Transfers in flight by handle, and the rows that each writes.
    handles: dict[int, Indexes] = field(default_factory=dict)
    error: TransferError | None = None


@dataclass(eq=False)
class _Peer:
    memory: RankMemory
    rows: RowTable
    #: Prepared descriptor list per memory type.
    sides: dict[str, int] = field(default_factory=dict)
    contact: Read = field(default_factory=Read)
    #: Reads from it are refused; forgotten as soon as nothing of it is in flight.
    lost: bool = False


class PeerReader:
    """Reads rows of peers into this rank's slabs through one NIXL agent."""

    def __init__(
        self, name: str, extents: tuple[ExtentMemory, ...], row_bytes: int, faults: Faults | None
    ) -> None:
        """Start the agent and register the slabs.

        Raises:
            TransferError: NIXL is not to be had, or refuses the memory.
        """
        self._agent = NixlAgent(name)
        self._faults = faults
        self._row_bytes = row_bytes
        self._piece_rows = max(1, PIECE_BYTES // row_bytes)
        self._rows = RowTable(extents, row_bytes)
        for extent in extents:
            nbytes = extent.rows * row_bytes
            self._agent.register(extent.memory_type, extent.address, nbytes, extent.device_id)
        self._sides = {
            kind: self._agent.prepare("", kind, self._rows.descriptors(kind))
            for kind in self._rows.memory_types
        }
        self.memory = RankMemory(name, self._agent.metadata(), row_bytes, extents)
        # After the metadata was taken: peers need not know of it.
        self._scratch = torch.empty(row_bytes, dtype=torch.uint8)
        self._scratch_side = self._prepare_scratch()
        self._peers: dict[str, _Peer] = {}
        self._flights: list[_Flight] = []

    def connect(self, memory: RankMemory, future: Future[None]) -> None:
        """Make a peer known and read one row of it, so that the first real read is a fast one."""
        peer = self._peers.get(memory.agent)
        try:
            if peer is None:
                peer = self._add(memory)
            elif peer.lost:
                raise TransferError("the peer is gone, and a read from it has not ended yet")
        except Exception as exc:
            future.set_exception(_as_transfer_error(exc))
            return
        peer.contact.done.add_done_callback(lambda contact: _copy(contact, future))

    def disconnect(self, agent: str) -> None:
        """Refuse further reads from a peer; those in flight go on."""
        if agent in self._peers:
            self._peers[agent].lost = True

    def read(
        self,
        agent: str,
        sources: Indexes,
        targets: Indexes,
        deadline: float,
        read: Read,
        arrived: Arrived,
    ) -> None:
        """Start reading; ``deadline`` on the monotonic clock."""
        peer, now = self._peers.get(agent), time.monotonic()
        try:
            if peer is None or peer.lost:
                raise TransferError("not connected to that peer, or it is gone")
            if now >= deadline:
                raise TransferError("timed out waiting for other reads to end")
            if self._faults is not None:
                self._faults.strike("fetch")
            transfers = list(plan(self._rows, targets, peer.rows, sources, self._piece_rows))
        except Exception as exc:
            read.fail(_as_transfer_error(exc))
            return
        flight = _Flight(read, peer, now, deadline, arrived)
        for t in transfers:
            sides = (self._sides[t.own_type], t.own, peer.sides[t.peer_type], t.peer)
            self._launch(flight, *sides, t.targets)
            self._collect(flight)  # between processes of one host a transfer ends when posted
        self._flights.append(flight)

    def poll(self) -> None:
        """Look after everything in flight, and forget lost peers."""
        for flight in self._flights:
            self._advance(flight)
        self._flights = [f for f in self._flights if f.handles]
        busy = {f.peer.memory.agent for f in self._flights}
        for peer in [p for p in self._peers.values() if p.lost]:
            if peer.memory.agent not in busy:
                self._forget(peer)

    def poll_seconds(self) -> float | None:
        """When to poll again; None while nothing is in flight."""
        if not self._flights:
            return None
        shortest, longest = _POLL_SECONDS
        age = time.monotonic() - max(f.began for f in self._flights)
        return min(max(age * _POLL_SHARE, shortest), longest)

    @property
    def hopeful(self) -> bool:
        """Whether a read is in flight that has not timed out."""
        return any(not f.read.done.done() for f in self._flights)

    def close(self) -> None:
        """Destroy the agent and with it whatever is in flight: then everything is settled."""
        for peer in list(self._peers.values()):
            peer.lost = True
        self.poll()
        self._agent.close()
        for flight in self._flights:
            flight.read.fail(TransferError("the transport was closed"))
        self._flights = []

    def _add(self, memory: RankMemory) -> _Peer:
        if memory.row_bytes != self._row_bytes:
            raise TransferError(
                f"the peer's rows have {memory.row_bytes} bytes and ours {self._row_bytes}: the "
                "replicas do not run the same model with the same layout and must not share"
            )
        if not memory.extents:
            raise TransferError("the peer offers no memory")
        self._agent.add_peer(memory.metadata)
        peer = _Peer(memory, RowTable(memory.extents, memory.row_bytes))
        self._peers[memory.agent] = peer
        flight = _Flight(peer.contact, peer, now := time.monotonic(), now + CONNECT_SECONDS)
        one = np.zeros(1, np.int32)
        try:
            for kind in peer.rows.memory_types:
                table = peer.rows.descriptors(kind)
                peer.sides[kind] = self._agent.prepare(memory.agent, kind, table)
                self._launch(flight, self._scratch_side, one, peer.sides[kind], one, NO_INDEXES)
        except TransferError as exc:
            self._break(flight, exc)
            raise
        finally:
            self._flights.append(flight)
        return peer

    def _prepare_scratch(self) -> int:
        address = self._scratch.data_ptr()
        self._agent.register("DRAM", address, self._row_bytes, 0)
        extent = ExtentMemory(0, 0, 1, address, 0, "DRAM")
        return self._agent.prepare(
            "", "DRAM", RowTable([extent], self._row_bytes).descriptors("DRAM")
        )

    def _launch(
        self,
        flight: _Flight,
        own_side: int,
        own: np.ndarray,
        peer_side: int,
        peer: np.ndarray,
        targets: Indexes,
    ) -> None:
        if flight.error is not None:
            return
        try:
            handle = self._agent.make_read(own_side, own, peer_side, peer)
            flight.handles[handle] = targets
            self._agent.post(handle)
        except TransferError as exc:
            self._break(flight, exc)

    def _advance(self, flight: _Flight) -> None:
        self._collect(flight)
        self._report(flight)

    def _collect(self, flight: _Flight) -> None:
        """Let go of transfers that have ended."""
        for handle, targets in list(flight.handles.items()):
            try:
                ended = self._agent.finished(handle)
            except TransferError as exc:
                self._break(flight, exc)
                ended = True
            if ended:
                self._agent.release(handle)
                del flight.handles[handle]
                if flight.error is None:
                    flight.arrived(targets)

    def _break(self, flight: _Flight, error: TransferError) -> None:
        """A transfer failed: UCX gives the whole connection up, and so do we."""
        flight.error = flight.error or error
        flight.peer.lost = True

    def _report(self, flight: _Flight) -> None:
        read, now = flight.read, time.monotonic()
        error = flight.error
        if error is None and flight.handles and now >= flight.deadline:
            limit = flight.deadline - flight.began
            error = TransferError(f"the peer did not deliver within {limit:.2g} seconds")
            # A peer that does not answer the first time is met anew, once that has ended.
            flight.peer.lost |= read is flight.peer.contact
        if not flight.handles:
            read.settled.set_result(None)
        if read.done.done():
            return
        if error is not None:
            read.done.set_exception(error)
        elif not flight.handles:
            read.done.set_result(now - flight.began)

    def _forget(self, peer: _Peer) -> None:
        for side in peer.sides.values():
            self._agent.release_prepared(side)
        self._agent.remove_peer(peer.memory.agent)
        del self._peers[peer.memory.agent]


def _copy(contact: Future[float], future: Future[None]) -> None:
    error = contact.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(None)


def _as_transfer_error(exc: Exception) -> TransferError:
    return exc if isinstance(exc, TransferError) else TransferError(f"{type(exc).__name__}: {exc}")
