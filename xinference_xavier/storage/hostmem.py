"""Anonymous host memory for slabs: exact size, huge pages, populated in the background.

The memory is private and has no name, so nothing is left behind when the process is killed. It is
unmapped when the last tensor that views it is gone. Population runs on a thread of its own at the
lowest priority and changes no byte, so rows may be written while it runs.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence

import torch

from xinference_xavier.storage.layout import align_up
from xinference_xavier.threads import leave_inherited_core
from xinference_xavier.types import CapacityError

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 * 1024 * 1024
#: Populated per call: small enough that closing a slab never waits long for it.
POPULATE_SLICE_BYTES = 8 * 1024 * 1024
#: Linux 5.14 and later; Python 3.11 has no name for it.
_MADV_POPULATE_WRITE = 23
_MADV_DONTNEED = 4
#: Address space that is not yet used does not count as memory, where the kernel overcommits.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
#: What populating says when there is no memory, unlike a kernel that cannot populate.
_NO_MEMORY = (errno.ENOMEM, errno.EFAULT)


def anonymous_bytes(nbytes: int, *, huge_pages: bool) -> torch.Tensor:
    """``nbytes`` of zeroed private memory as uint8 ``[nbytes]``, at a huge page boundary.

    Address space, not memory, is spent on reaching the boundary, and only whole huge pages are
    asked for, so the resident size never exceeds ``nbytes`` rounded up to a page.

    Raises:
        CapacityError: the kernel refuses to map that much.
    """
    padding_bytes = HUGE_PAGE_BYTES if huge_pages else 0
    length = align_up(nbytes + padding_bytes, mmap.PAGESIZE)
    try:
        area = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, ValueError, OverflowError) as exc:
        raise CapacityError(
            f"cannot map {nbytes} bytes of host memory ({exc}); lower xavier_cpu_budget or "
            "xavier_gpu_budget, or raise the limit on address space"
        ) from exc
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES if huge_pages else 0
    _advise(area, start, nbytes, huge_pages=huge_pages)
    return whole[start : start + nbytes]


def _advise(area: mmap.mmap, start: int, nbytes: int, *, huge_pages: bool) -> None:
    """Ask for huge pages and keep the memory out of forked children, where the kernel can."""
    try:
        if hasattr(mmap, "MADV_DONTFORK"):
            area.madvise(mmap.MADV_DONTFORK)
        whole_bytes = nbytes - nbytes % HUGE_PAGE_BYTES
        if huge_pages and whole_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE, start, whole_bytes)
    except OSError as exc:  # advice only: a kernel without it costs speed, not correctness
        logger.debug("memory advice refused: %s", exc)


class Populator:
    """Backs a piece of a slab with pages, or with ``release`` gives them back, slice by slice on a
    background thread, once those in ``after`` have ended."""

    def __init__(
        self,
        memory: torch.Tensor,
        *,
        release: bool = False,
        after: Sequence[Populator] = (),
    ) -> None:
        self._memory = memory
        self._release = release
        self._after = after
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xavier-touch", daemon=True)
        #: Bytes populated or given back so far.
        self.populated_bytes = 0
        #: Why there is no memory for the rest; None if there is.
        self.problem: str | None = None
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the end; whether it came in time."""
        self._thread.join(timeout_seconds)
        return self.ended

    def stop(self) -> None:
        """End after the current slice; returns at once."""
        if not self._release:  # pages that were promised to the system go
            self._stop.set()

    def close(self) -> None:
        """Stop after the current slice, and what it waits for too."""
        self._halt()
        self._thread.join()

    def _halt(self) -> None:
        self._stop.set()
        for earlier in self._after:
            earlier._halt()

    def _run(self) -> None:
        leave_inherited_core(nice=19)
        for earlier in self._after:
            earlier.join()
        self._after = ()
        try:
            self._advise(ctypes.CDLL(None, use_errno=True))
        except (OSError, AttributeError) as exc:  # a platform without madvise
            logger.debug("slab not populated ahead: %s", exc)

    def _advise(self, libc: ctypes.CDLL) -> None:
        first, end = self._memory.data_ptr(), self._memory.data_ptr() + self._memory.numel()
        advice = _MADV_DONTNEED if self._release else _MADV_POPULATE_WRITE
        address = first - first % mmap.PAGESIZE
        if self._release:  # the row before it may end within its first page; none comes after it
            address = align_up(first, mmap.PAGESIZE)
        while address < end and not self._stop.is_set():
            length = min(POPULATE_SLICE_BYTES, end - address)
            # ctypes drops the GIL; mmap.madvise keeps it.
            if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
                number = ctypes.get_errno()
                error = os.strerror(number)
                logger.debug("slab not populated ahead: %s; first use pays for it", error)
                if number in _NO_MEMORY and not self._release:
                    self.problem = f"the system has no memory for it ({error})"
                return
            address += length
            self.populated_bytes = min(address, end) - first


def pin(memory: torch.Tensor) -> None:
    """Register host memory with CUDA, which also populates it.

    Raises:
        CapacityError: CUDA refuses, for example because of a memory lock limit.
    """
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise CapacityError(
            f"CUDA cannot pin {memory.numel()} bytes of host memory (error {int(code)}); lower "
            "xavier_cpu_budget or raise the memory lock limit (ulimit -l)"
        )


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``; a failure is logged, since the process is closing its slab anyway."""
    code = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    if int(code) != 0:
        logger.warning("CUDA did not release pinned host memory (error %d)", int(code))
