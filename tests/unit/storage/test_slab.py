"""Slabs and their memory: size, placement, population, and the way it goes back."""

from __future__ import annotations

import mmap
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from xinference_xavier.storage.copier import create_copier
from xinference_xavier.storage.hostmem import (
    HUGE_PAGE_BYTES,
    Populator,
    anonymous_bytes,
    leave_inherited_core,
)
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.slab import Slab
from xinference_xavier.types import CapacityError

ROW_BYTES = 3 * 4096 + 8
ROWS = 1000  # 12.3 MB: neither a power of two nor whole huge pages

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")


def mapping(address: int) -> dict[str, str]:
    """The fields of the mapping that holds ``address``, and its first line as ``""``; or empty."""
    fields: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head is not None:
            if fields:
                return fields
            if int(head[1], 16) <= address < int(head[2], 16):
                fields[""] = line
        elif fields:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def resident_bytes(slab: Slab) -> int:
    """Resident bytes of the mappings that hold the slab (advice may have split it)."""
    start, total, seen = slab.extents[0].address, 0, set()
    for address in range(start, start + slab.nbytes, mmap.PAGESIZE):
        fields = mapping(address) if not seen or address >= max(seen) else {}
        if fields:
            seen.add(int(fields[""].split()[0].split("-")[1], 16))
            total += int(fields["Rss"].split()[0]) * 1024
    return total


def test_a_slab_is_zeroed_and_viewed_by_rows() -> None:
    slab = Slab(ROWS, ROW_BYTES, "cpu")
    assert (slab.rows, slab.row_bytes, slab.nbytes) == (ROWS, ROW_BYTES, ROWS * ROW_BYTES)
    assert slab.extents[0].address % HUGE_PAGE_BYTES == 0
    view = slab.view(10, 5)
    assert view.shape == (5, ROW_BYTES)
    assert view.dtype == torch.uint8
    assert not view.any()
    view.fill_(7)
    assert int(slab.view(14, 1)[0, -1]) == 7
    assert not slab.view(15, 1).any()
    slab.close()


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (999, 2), (1000, 1), (0, 1001), (0, -1)])
def test_a_view_outside_the_slab_is_refused(first: int, count: int) -> None:
    slab = Slab(ROWS, 8, "cpu", huge_pages=False)
    with pytest.raises(IndexError, match="do not lie in one extent"):
        slab.view(first, count)
    slab.close()


def test_rows_are_cut_into_ascending_runs() -> None:
    slab = Slab(100, 8, "cpu", huge_pages=False)
    rows = np.array([4, 5, 6, 9, 8, 7, 99, 0, 1])
    assert list(slab.runs(rows)) == [(4, 3), (9, 1), (8, 1), (7, 1), (99, 1), (0, 2)]
    assert list(slab.runs(rows[:0])) == []
    for outside in (-1, 100):
        with pytest.raises(IndexError, match=f"row {outside} is outside"):
            list(slab.runs(np.array([0, outside])))
    slab.close()


@needs_proc
@pytest.mark.parametrize("huge_pages", [True, False])
def test_touched_memory_is_exactly_the_slab_and_nameless(huge_pages: bool) -> None:
    slab = Slab(ROWS, ROW_BYTES, "cpu", huge_pages=huge_pages)
    address = slab.extents[0].address
    slab.view(500, 1).fill_(9)
    slab.touch()
    slab.touch()
    assert slab.wait_touched(60)
    assert int(slab.view(500, 1)[0, 0]) == 9  # population changes no byte
    if slab.touched_bytes == slab.nbytes:  # a kernel that can populate ahead
        assert 0 <= resident_bytes(slab) - slab.nbytes <= mmap.PAGESIZE
    permissions, _, _, inode = mapping(address)[""].split()[1:5]
    assert permissions == "rw-p"  # private: nothing under /dev/shm to leave behind
    assert inode == "0"
    slab.close()
    slab.close()
    assert not mapping(address)
    assert not [t for t in threading.enumerate() if t.name.startswith("xavier-")]


@needs_proc
def test_memory_lives_as_long_as_a_view_of_it() -> None:
    slab = Slab(ROWS, ROW_BYTES, "cpu")
    address, view = slab.extents[0].address, slab.view(3, 1)
    slab.close()
    assert mapping(address)
    view.fill_(1)
    del view
    assert not mapping(address)


@needs_proc
def test_a_closed_copier_holds_no_memory() -> None:
    layout = RowLayout.from_refs([torch.zeros(4, 8, dtype=torch.int8)], [[(0, 8)]])
    slab = Slab(ROWS, 8, "cpu")
    address = slab.extents[0].address
    copier = create_copier(layout, slab, None)
    copier.close()
    slab.close()
    assert not mapping(address)


def test_population_stops_at_the_next_slice() -> None:
    memory = anonymous_bytes(2**31, huge_pages=True)  # would take about a second or more
    populator = Populator(memory)
    populator.close()
    assert populator.join(0)
    assert populator.populated_bytes < memory.numel()


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 8), (-1, 8), (1, 0), (1, 12)])
def test_impossible_sizes_are_refused(rows: int, row_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"at least one row|multiple of 8"):
        Slab(rows, row_bytes, "cpu")


def test_more_than_the_address_space_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="lower xavier_cpu_budget"):
        Slab(2**20, 2**40, "cpu")


def test_slabs_must_fit_the_layout() -> None:
    layout = RowLayout.from_refs([torch.zeros(4, 8, dtype=torch.int8)], [[(0, 8)]])
    slab = Slab(4, 16, "cpu")
    with pytest.raises(ValueError, match="the host slab has rows of 16 bytes, the layout needs 8"):
        create_copier(layout, None, slab)
    slab.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_background_thread_leaves_the_core_it_inherited() -> None:
    seen: list[tuple[set[int], set[int]]] = []

    def bound() -> None:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})

        def inherits() -> None:
            before = os.sched_getaffinity(0)
            leave_inherited_core()
            seen.append((before, os.sched_getaffinity(0)))

        thread = threading.Thread(target=inherits)
        thread.start()
        thread.join()
        os.sched_setaffinity(0, allowed)

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    ((before, after),) = seen
    assert len(before) == 1
    assert len(after) > 1


@pytest.mark.gpu
def test_a_pinned_slab_is_pinned_and_released() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    slab = Slab(ROWS, ROW_BYTES, "cpu", pinned=True)
    view = slab.view(0, ROWS)
    assert view.is_pinned()
    slab.close()
    assert not view.is_pinned()
