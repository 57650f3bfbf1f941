"""A slab that grows and shrinks: same addresses, same bytes, and memory that really goes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from test_nixl_agent import needs_nixl
from test_slab import mapping, needs_proc

from xinference_xavier.storage.rank_memory import extents_of
from xinference_xavier.storage.slab import Slab
from xinference_xavier.storage.transport import Transport

ROW_BYTES = 12_344  # no multiple of a page
ROWS, MOST = 1000, 4000


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(slab: Slab) -> None:
    assert slab.wait_touched(60)


@needs_proc
def test_memory_goes_with_its_rows_and_the_others_keep_their_bytes() -> None:
    slab = Slab(ROWS, ROW_BYTES, "cpu", most_rows=MOST)
    address = slab.extents[0].address
    slab.view(0, ROWS).fill_(7)
    before = rss_bytes()
    task = slab.resize(100)
    assert task is not None
    settled(slab)
    gone = 900 * ROW_BYTES
    assert before - rss_bytes() > gone * 0.9
    assert bool((slab.view(0, 100) == 7).all())
    assert not bool(slab.view(101, 800).any()), "what is read of rows that went is zero"
    slab.resize(ROWS)
    settled(slab)
    assert slab.extents[0].address == address
    slab.close()


@needs_proc
def test_memory_that_a_device_has_locked_stays() -> None:
    """It would read the pages that were there when they were registered."""
    slab = Slab(ROWS, ROW_BYTES, "cpu", most_rows=MOST, locked=True)
    assert (slab.elastic, slab.most_rows) == (False, ROWS)
    slab.view(0, ROWS).fill_(7)
    slab.resize(100)
    settled(slab)
    slab.resize(ROWS)
    settled(slab)
    assert bool((slab.view(0, ROWS) == 7).all())
    slab.close()


@needs_proc
def test_growth_is_backed_in_the_background_at_the_addresses_known() -> None:
    slab = Slab(ROWS, ROW_BYTES, "cpu", most_rows=MOST)
    known = extents_of(slab, None)
    slab.touch()
    settled(slab)
    before = rss_bytes()
    slab.resize(3000)
    settled(slab)
    assert rss_bytes() - before > 2000 * ROW_BYTES * 0.9
    assert (slab.rows, slab.nbytes, slab.most_rows) == (3000, 3000 * ROW_BYTES, MOST)
    slab.view(2999, 1).fill_(1)
    assert extents_of(slab, None) == known
    slab.close()
    assert not mapping(known[0].address)


def test_changes_run_in_their_order() -> None:
    slab = Slab(ROWS, ROW_BYTES, "cpu", most_rows=MOST)
    slab.touch()
    for rows in (MOST, 10, 2000, 1, 500):
        slab.resize(rows)
    settled(slab)
    slab.view(499, 1).fill_(3)
    assert slab.resize(500) is None
    slab.close()


@needs_proc
def test_address_space_is_no_memory() -> None:
    before = rss_bytes()
    slab = Slab(ROWS, ROW_BYTES, "cpu", most_rows=2**21)  # more than most machines have
    assert slab.most_rows >= ROWS
    assert rss_bytes() - before < ROWS * ROW_BYTES
    slab.view(0, ROWS).fill_(1)
    slab.close()


def test_without_address_space_a_slab_is_as_large_as_asked() -> None:
    slab = Slab(ROWS, ROW_BYTES, "cpu", most_rows=2**50)
    assert slab.most_rows == slab.rows == ROWS
    slab.close()


@pytest.mark.gpu
def test_on_a_device_memory_stays_allocated() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for slab in (
        Slab(ROWS, ROW_BYTES, "cuda", most_rows=MOST),
        Slab(ROWS, ROW_BYTES, "cpu", pinned=True, most_rows=MOST),
    ):
        assert slab.most_rows == ROWS
        assert slab.resize(10) is None
        assert slab.resize(ROWS) is None
        slab.view(ROWS - 1, 1).fill_(1)
        slab.close()


@needs_nixl
def test_peers_read_grown_rows_and_nothing_of_rows_that_went() -> None:
    """Over the connection they had: NIXL has all of the address space from the start."""
    owner = Slab(256, 4096, "cpu", most_rows=65_536)
    reader = Slab(256, 4096, "cpu", most_rows=65_536)
    sender, receiver = Transport(owner, None), Transport(None, reader)
    target = np.array([~0])

    def read(row: int) -> set[int]:
        receiver.read(sender.memory(), np.array([row]), target, 10.0).done.result(20)
        return set(reader.view(0, 1).flatten().tolist())

    try:
        receiver.connect(sender.memory()).result(20)
        owner.view(0, 256).fill_(9)
        assert read(255) == {9}
        owner.resize(10)
        settled(owner)
        assert read(255) == {0}
        assert read(9) == {9}
        owner.resize(5000)
        settled(owner)
        owner.view(4999, 1).fill_(4)
        assert read(4999) == {4}
    finally:
        for each in (receiver, sender, owner, reader):
            each.close()
