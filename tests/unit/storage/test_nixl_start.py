"""NIXL and UCX leave the code of the process that they start in alone.

By default UCX rewrites the first instructions of libc's memory calls, which ends a process whose
threads are inside one: seen with engines that populated their slabs meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("nixl")

START = """
import ctypes, json, os
from xinference_xavier.storage.nixl_agent import NixlAgent

NAMES = ("madvise", "munmap", "mmap", "mremap", "brk", "sbrk", "shmat", "shmdt")
LIBC = ctypes.CDLL(None)

def code():
    addresses = (ctypes.cast(getattr(LIBC, name), ctypes.c_void_p).value for name in NAMES)
    return [ctypes.string_at(address, 16) for address in addresses]

before = code()
agent = NixlAgent("starts")
changed = [name for name, old, new in zip(NAMES, before, code()) if old != new]
print(json.dumps(changed), flush=True)
os._exit(0)
"""


def rewritten(**environment: str) -> list[str]:
    """Functions of libc whose code an agent's start has changed."""
    inherited = {k: v for k, v in os.environ.items() if k != "UCX_MEM_MMAP_HOOK_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", START],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def test_no_code_is_rewritten() -> None:
    assert rewritten() == []


def test_the_environment_decides_otherwise() -> None:
    assert "madvise" in rewritten(UCX_MEM_MMAP_HOOK_MODE="bistro")
