"""Starting NIXL while other threads are inside memory calls, as they are when an engine starts.

UCX's own default rewrites the first instructions of ``madvise`` and its kin, which ends a process
whose threads are inside one: seen with engines that populated their slabs meanwhile.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("nixl")

START = """
import ctypes, mmap, os, threading
from xinference_xavier.storage.nixl_agent import NixlAgent

libc, stop, nbytes = ctypes.CDLL(None), threading.Event(), 8 << 20

def populate_and_drop():
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))
    while not stop.wait(0.001):  # a pause, or the kernel lets nobody else change the memory map
        for advice in (23, 4):  # MADV_POPULATE_WRITE, MADV_DONTNEED
            libc.madvise(address, ctypes.c_size_t(nbytes), advice)

threads = [threading.Thread(target=populate_and_drop) for _ in range(2)]
for thread in threads:
    thread.start()
agent = NixlAgent("starts")
stop.set()
for thread in threads:
    thread.join()
print("lives", os.environ["UCX_MEM_MMAP_HOOK_MODE"], flush=True)
os._exit(0)
"""


def test_threads_inside_memory_calls_survive_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_MEM_MMAP_HOOK_MODE", raising=False)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", START], capture_output=True, text=True, timeout=90, check=False
        )
        assert (done.returncode, done.stdout.split()[-2:]) == (0, ["lives", "reloc"]), done.stderr
