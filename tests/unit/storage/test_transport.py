"""Reads between real processes through real NIXL: the right bytes, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from peer_process import PeerProcess, Rank

from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.slab import Slab
from xinference_xavier.storage.transport import RankMemory, Transport, nixl_problem
from xinference_xavier.types import TransferError

ROWS, ROW_BYTES = 24, 64 * 1024

pytestmark = pytest.mark.skipif(nixl_problem() is not None, reason=str(nixl_problem()))


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    peer = PeerProcess(ROWS, ROWS, ROW_BYTES)
    yield peer
    peer.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank(ROWS, ROWS, ROW_BYTES)
    rank.clear()
    yield rank
    rank.close()


@pytest.fixture
def transport(rank: Rank) -> Iterator[Transport]:
    transport = Transport(rank.device, rank.host)
    yield transport
    transport.close()
    assert not [t for t in threading.enumerate() if t.name == "xavier-nixl"]


def at(*rows: int, host: bool) -> np.ndarray:
    found = np.array(rows, np.int64)
    return ~found if host else found


PATTERNS = {
    "one": ([3], [5]),
    "run": (range(4, 14), range(2, 12)),
    "backwards": (range(13, 3, -1), range(2, 12)),
    "scattered": ([0, 7, 8, 23, 2], [9, 1, 2, 0, 23]),
    "all": (range(ROWS), range(ROWS)),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("to_host", [False, True], ids=["to_gpu", "to_cpu"])
@pytest.mark.parametrize("from_host", [False, True], ids=["from_gpu", "from_cpu"])
def test_rows_arrive_as_they_are(
    peer: PeerProcess,
    rank: Rank,
    transport: Transport,
    from_host: bool,
    to_host: bool,
    pattern: str,
) -> None:
    sources, targets = PATTERNS[pattern]
    sources, targets = at(*sources, host=from_host), at(*targets, host=to_host)
    transport.connect(peer.memory).result(10)
    read = transport.read(peer.memory, sources, targets, 10)
    assert 0 < read.done.result(10) < 10
    assert read.settled.done()
    assert rank.holds(targets, sources)


def test_tiers_may_be_mixed_on_both_sides(
    peer: PeerProcess, rank: Rank, transport: Transport
) -> None:
    rng = np.random.default_rng(1)
    sources = rng.permutation(rank.locations)
    targets = rng.permutation(rank.locations)
    transport.connect(peer.memory).result(10)
    transport.read(peer.memory, sources, targets, 10).done.result(10)
    assert rank.holds(targets, sources)


def test_no_rows_are_read_at_once(peer: PeerProcess, rank: Rank, transport: Transport) -> None:
    none = np.empty(0, np.int64)
    transport.connect(peer.memory).result(10)
    read = transport.read(peer.memory, none, none, 1)
    assert read.done.result(10) >= 0
    assert read.settled.done()


def test_what_the_owner_writes_later_is_what_a_later_read_sees(
    peer: PeerProcess, rank: Rank, transport: Transport
) -> None:
    rows = at(*range(8), host=True)
    transport.connect(peer.memory).result(10)
    for seed in (3, 0):
        peer.ask("fill", seed)
        transport.read(peer.memory, rows, rows, 10).done.result(10)
        assert rank.holds(rows, rows, seed)


def test_two_ranks_read_from_one_owner_and_from_each_other(
    peer: PeerProcess, rank: Rank, transport: Transport
) -> None:
    rank.fill()
    other = PeerProcess(0, ROWS, ROW_BYTES)
    try:
        host = at(*range(ROWS), host=True)
        own = at(*range(ROWS), host=False)
        transport.connect(peer.memory).result(10)
        other.tell("read", peer.memory, host, host, 50)
        reads = [transport.read(peer.memory, host, own, 10) for _ in range(50)]
        assert all(read.done.result(10) > 0 for read in reads)
        assert other.answer()
        rank.clear()
        transport.read(peer.memory, host, own, 10).done.result(10)
        assert rank.holds(own, host)
        rank.fill()
        assert other.ask("read", transport.memory(), own, host, 1)
    finally:
        other.close()


def test_connecting_again_is_free(peer: PeerProcess, transport: Transport) -> None:
    both = [transport.connect(peer.memory) for _ in range(2)]
    assert [future.result(10) for future in both] == [None, None]
    start = time.perf_counter()
    transport.connect(peer.memory).result(10)
    assert time.perf_counter() - start < 0.05


def test_the_memory_travels_pickled_and_is_no_text(transport: Transport) -> None:
    memory = transport.memory()
    assert pickle.loads(pickle.dumps(memory)) == memory
    assert repr(memory.metadata) not in repr(memory)
    assert [(e.tier, e.first_row, e.rows, e.memory_type) for e in memory.extents] == [
        (0, 0, ROWS, "DRAM"),
        (1, 0, ROWS, "DRAM"),
    ]


def test_other_row_sizes_are_refused(peer: PeerProcess, transport: Transport) -> None:
    other = dataclasses.replace(peer.memory, row_bytes=ROW_BYTES * 2)
    with pytest.raises(TransferError, match=f"{ROW_BYTES * 2} bytes and ours {ROW_BYTES}"):
        transport.connect(other).result(10)
    with pytest.raises(TransferError, match="not connected"):
        transport.read(other, at(0, host=True), at(0, host=True), 1).done.result(10)


BAD_READS = {
    "unknown source": (at(ROWS, host=False), at(0, host=False), "in no slab"),
    "unknown target": (at(0, host=True), at(ROWS, host=True), "in no slab"),
    "lengths": (at(0, 1, host=True), at(0, host=True), "2 rows into 1"),
}


@pytest.mark.parametrize("case", BAD_READS)
def test_bad_locations_fail_the_read_alone(
    peer: PeerProcess, rank: Rank, transport: Transport, case: str
) -> None:
    sources, targets, message = BAD_READS[case]
    transport.connect(peer.memory).result(10)
    bad = transport.read(peer.memory, sources, targets, 1)
    with pytest.raises(TransferError, match=message):
        bad.done.result(10)
    assert bad.settled.done()
    good = at(1, host=True)
    transport.read(peer.memory, good, good, 10).done.result(10)
    assert rank.holds(good, good)


def test_a_planned_fault_strikes_before_any_byte(peer: PeerProcess, rank: Rank) -> None:
    transport = Transport(rank.device, rank.host, faults=Faults.parse("fetch:2"))
    rows = at(0, host=True)
    try:
        transport.connect(peer.memory).result(10)
        transport.read(peer.memory, rows, rows, 10).done.result(10)
        rank.clear()
        struck = transport.read(peer.memory, rows, rows, 10)
        with pytest.raises(TransferError, match="fetch number 2"):
            struck.done.result(10)
        assert struck.settled.done()
        assert rank.untouched(~0)
    finally:
        transport.close()


def test_a_closed_transport_refuses(peer: PeerProcess, rank: Rank) -> None:
    transport = Transport(rank.device, rank.host)
    transport.close()
    transport.close()
    rows = at(0, host=True)
    read = transport.read(peer.memory, rows, rows, 1)
    for future in (transport.connect(peer.memory), read.done):
        with pytest.raises(TransferError, match="closed"):
            future.result(10)
    assert read.settled.done()
    transport.disconnect(peer.memory.agent)


def test_the_futures_cannot_be_cancelled(peer: PeerProcess, transport: Transport) -> None:
    contact = transport.connect(peer.memory)
    assert not contact.cancel()
    contact.result(10)
    read = transport.read(peer.memory, at(0, host=True), at(0, host=True), 10)
    assert not read.done.cancel()
    assert not read.settled.cancel()
    read.done.result(10)


def test_it_sleeps_while_idle_and_leaves_no_thread(peer: PeerProcess, rank: Rank) -> None:
    Transport(rank.device, rank.host).close()  # whatever the libraries keep is there from here on
    before = len(os.listdir("/proc/self/task"))
    transport = Transport(rank.device, rank.host)
    transport.connect(peer.memory).result(10)
    start = time.process_time()
    time.sleep(1.0)  # the time itself is what is measured
    assert time.process_time() - start < 0.2
    transport.close()
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_registering_and_connecting_touch_no_memory(peer: PeerProcess) -> None:
    slab = Slab(8192, ROW_BYTES, "cpu")
    before = resident_bytes()
    transport = Transport(None, slab)
    try:
        transport.connect(peer.memory).result(10)
        assert resident_bytes() - before < slab.nbytes / 4
    finally:
        transport.close()
        slab.close()


def test_slabs_must_agree_on_the_row_size() -> None:
    small, large = Slab(1, 4096, "cpu"), Slab(1, 8192, "cpu")
    with pytest.raises(TransferError, match=r"one row size, got \[4096, 8192\]"):
        Transport(small, large)
    with pytest.raises(TransferError, match="one row size"):
        Transport(None, None)


def test_memory_of_a_stranger_is_refused(transport: Transport) -> None:
    stranger = RankMemory("nobody", b"no metadata", ROW_BYTES, transport.memory().extents)
    with pytest.raises(TransferError, match="reach the peer"):
        transport.connect(stranger).result(10)
