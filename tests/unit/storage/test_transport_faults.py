"""Peers that die, stop, come back or never answer: reads fail in time, and no byte lands late.

Where the owner must answer itself (``UCX_TLS=tcp,self``, as between hosts without RDMA) a stopped
owner holds a read open; with the default transport a read of a stopped owner simply succeeds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from peer_process import PeerProcess, Rank

from xinference_xavier.storage.transport import Read, Transport, nixl_problem
from xinference_xavier.types import TransferError

ROWS, ROW_BYTES = 32, 512 * 1024
HOST = ~np.arange(ROWS)
TLS = [pytest.param(None, id="default"), pytest.param("tcp,self", id="tcp")]

#: How long nothing may land for it to count as settled.
QUIET_SECONDS = 0.3

pytestmark = pytest.mark.skipif(nixl_problem() is not None, reason=str(nixl_problem()))

Meet = Callable[..., PeerProcess]


def shared_memory(pids: set[int]) -> list[str]:
    """System V segments, which UCX uses, that these processes made."""
    with open("/proc/sysvipc/shm") as segments:
        return [line for line in list(segments)[1:] if int(line.split()[4]) in pids]


@pytest.fixture
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    tls: str | None = getattr(request, "param", "tcp,self")
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    return tls


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank(0, ROWS, ROW_BYTES)
    rank.clear()
    yield rank
    rank.close()


@pytest.fixture
def pids() -> set[int]:
    """The processes of a test."""
    return {os.getpid()}


@pytest.fixture
def transport(tls: str | None, rank: Rank, pids: set[int]) -> Iterator[Transport]:
    transport = Transport(rank.device, rank.host)
    yield transport
    transport.close()
    assert shared_memory(pids) == []


@pytest.fixture
def meet(tls: str | None, transport: Transport, pids: set[int]) -> Iterator[Meet]:
    """Start a peer and connect to it."""
    peers: list[PeerProcess] = []

    def start() -> PeerProcess:
        peers.append(PeerProcess(0, ROWS, ROW_BYTES, tls))
        pids.add(peers[-1].pid)
        transport.connect(peers[-1].memory).result(10)
        if tls is None:
            assert shared_memory(pids), "else the check after the test sees nothing"
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def read(transport: Transport, peer: PeerProcess, timeout_seconds: float = 10) -> Read:
    return transport.read(peer.memory, HOST, HOST, timeout_seconds)


def test_the_check_for_quiet_sees_a_written_row(rank: Rank) -> None:
    """Not a test of the transport: what ``assert_quiet`` relies on."""
    rank.fill()
    with pytest.raises(AssertionError):
        assert_quiet(rank, 0)


def assert_quiet(rank: Rank, seconds: float = QUIET_SECONDS) -> None:
    """Nothing is written to any row from here on."""
    time.sleep(seconds)  # that something does not happen can only be waited for
    assert all(rank.untouched(at) for at in rank.locations.tolist())


@pytest.mark.parametrize("tls", TLS, indirect=True)
def test_a_dead_owner_fails_reads_and_its_successor_serves(
    rank: Rank, transport: Transport, meet: Meet
) -> None:
    first = meet()
    first.kill()
    start = time.monotonic()
    failed = read(transport, first)
    with pytest.raises(TransferError, match="gone"):
        failed.done.result(10)
    assert failed.settled.done()
    with pytest.raises(TransferError):
        read(transport, first).done.result(10)
    with pytest.raises(TransferError):
        transport.connect(first.memory).result(10)
    assert time.monotonic() - start < 1
    second = meet()
    assert second.memory.agent != first.memory.agent
    read(transport, second).done.result(10)
    assert rank.holds(HOST, HOST)


@pytest.mark.parametrize("tls", TLS, indirect=True)
def test_an_owner_killed_among_reads_fails_the_rest(
    rank: Rank, transport: Transport, meet: Meet
) -> None:
    peer = meet()
    reads = [read(transport, peer) for _ in range(200)]
    reads[2].done.result(10)
    peer.kill()
    start = time.monotonic()
    errors = [one.done.exception(10) for one in reads]
    for one in reads:
        one.settled.result(1)
    assert time.monotonic() - start < 1
    assert errors[:3] == [None, None, None]
    failed = [error for error in errors if error is not None]
    assert failed
    assert all(isinstance(error, TransferError) for error in failed)
    assert errors == [None] * (len(errors) - len(failed)) + failed
    rank.clear()
    assert_quiet(rank)


def test_an_owner_killed_in_the_middle_of_a_read_settles_it(
    rank: Rank, transport: Transport, meet: Meet
) -> None:
    peer = meet()
    peer.stop()
    late, young = read(transport, peer, 0.2), read(transport, peer)
    with pytest.raises(TransferError, match=r"within 0\.2 seconds"):
        late.done.result(10)
    assert not late.settled.done()
    assert not young.done.done()
    start = time.monotonic()
    peer.kill()
    with pytest.raises(TransferError, match="gone"):
        young.done.result(10)
    young.settled.result(1)
    late.settled.result(1)
    assert time.monotonic() - start < 1
    rank.clear()
    assert_quiet(rank)


def test_a_read_that_timed_out_is_open_until_it_has_landed(
    rank: Rank, transport: Transport, meet: Meet
) -> None:
    peer = meet()
    peer.stop()
    late = read(transport, peer, 0.2)
    with pytest.raises(TransferError, match=r"did not deliver within 0\.2 seconds"):
        late.done.result(10)
    transport.disconnect(peer.memory.agent)  # ends no transfer, only forbids new ones
    with pytest.raises(TransferError, match="not connected"):
        read(transport, peer).done.result(10)
    with pytest.raises(TransferError, match="has not ended"):
        transport.connect(peer.memory).result(10)
    assert not late.settled.done()
    assert_quiet(rank, 0)
    peer.signal(signal.SIGCONT)
    late.settled.result(10)
    assert rank.holds(HOST, HOST)
    rank.clear()
    assert_quiet(rank)
    transport.connect(peer.memory).result(10)
    read(transport, peer).done.result(10)
    assert rank.holds(HOST, HOST)


def test_other_peers_are_served_beside_a_silent_one(
    rank: Rank, transport: Transport, meet: Meet
) -> None:
    silent, lively = meet(), meet()
    silent.stop()
    half = HOST[: ROWS // 2]
    late = transport.read(silent.memory, half, half, 10)
    other = HOST[ROWS // 2 :]
    assert transport.read(lively.memory, other, other, 10).done.result(10) < 5
    assert not late.done.done()
    assert rank.holds(other, other)
    silent.signal(signal.SIGCONT)
    late.done.result(10)
    assert rank.holds(HOST, HOST)


@pytest.mark.parametrize("tls", [None], indirect=True)
def test_the_default_transport_reads_from_a_stopped_owner(
    rank: Rank, transport: Transport, meet: Meet
) -> None:
    peer = meet()
    peer.stop()
    read(transport, peer).done.result(10)
    assert rank.holds(HOST, HOST)


def test_closing_with_open_reads_is_quick_and_final(
    rank: Rank, transport: Transport, meet: Meet
) -> None:
    peer = meet()
    peer.stop()
    late, young = read(transport, peer, 0.1), read(transport, peer)
    with pytest.raises(TransferError, match="did not deliver"):
        late.done.result(10)
    start = time.monotonic()
    transport.close(1.0)
    assert time.monotonic() - start < 1
    assert late.settled.done()
    assert young.settled.done()
    with pytest.raises(TransferError, match="closed"):
        young.done.result(0)
    rank.clear()
    peer.signal(signal.SIGCONT)
    assert_quiet(rank)


def test_closing_lets_a_running_read_end(rank: Rank, transport: Transport, meet: Meet) -> None:
    peer = meet()
    running = read(transport, peer)
    transport.close(4.0)
    running.done.result(0)
    assert rank.holds(HOST, HOST)


def test_a_peer_that_never_answers_is_told_and_may_be_met_later(
    tls: str | None, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xinference_xavier.storage.peer_reader.CONNECT_SECONDS", 0.2)
    peer = PeerProcess(0, ROWS, ROW_BYTES, tls)
    try:
        peer.stop()
        with pytest.raises(TransferError, match=r"within 0\.2 seconds"):
            transport.connect(peer.memory).result(10)
        with pytest.raises(TransferError):
            read(transport, peer).done.result(10)
        peer.signal(signal.SIGCONT)
        assert peer.ask("fill") is None
        deadline = time.monotonic() + 10
        while transport.connect(peer.memory).exception(10) is not None:
            assert time.monotonic() < deadline
        read(transport, peer).done.result(10)
    finally:
        peer.close()
