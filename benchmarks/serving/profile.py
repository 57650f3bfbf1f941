"""The share of the scheduler's time that is spent in this package, by sampling it with py-spy.

py-spy looks at a process from outside, 100 times a second, and does not slow it. Two shares: of all
samples of the scheduler's thread, and of those in which it was not asleep. It needs py-spy in the
environment and the right to look at processes of the same user.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "xinference_xavier"
RATE = 100
#: Where vLLM's engine waits: for requests, or for its ranks to end a step.
WAITS = ("wait", "poll", "select", "get (queue.py", "sleep", "recv", "dequeue", "acquire_read")


def find_py_spy() -> str:
    """Path of the program. Raises ``ValueError`` when it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise ValueError("--profile needs py-spy: pip install py-spy, or leave the option out")
    return found


def share(stacks: str) -> dict[str, int]:
    """Counts of py-spy's folded stacks: samples of the main thread, busy ones, and ours."""
    counted = {"samples": 0, "busy": 0, "ours": 0}
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        if "MainThread" not in stack:
            continue
        frames = stack.split(";")
        ours = any(PACKAGE in frame for frame in frames)
        counted["samples"] += int(count)
        counted["ours"] += int(count) if ours else 0
        waits = any(word in frames[-1].lower() for word in WAITS)
        counted["busy"] += int(count) if ours or not waits else 0
    return counted


@contextlib.contextmanager
def profiled(pids: Sequence[int], folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Sample the processes meanwhile; the list is filled, one entry each, when it ends."""
    found: list[dict[str, Any]] = []
    if not pids:
        yield found
        return
    program = find_py_spy()
    files = [folder / f"profile-{pid}.txt" for pid in pids]
    watchers = [_watch(program, pid, file) for pid, file in zip(pids, files, strict=True)]
    try:
        yield found
    finally:
        for watcher in watchers:
            watcher.send_signal(signal.SIGINT)
        for watcher in watchers:
            watcher.wait(timeout=60)
    for pid, file in zip(pids, files, strict=True):
        if not file.exists():
            said = file.with_suffix(".log").read_text()[-500:]
            raise RuntimeError(f"py-spy could not sample process {pid}: {said}")
        found.append({"pid": pid, **share(file.read_text())})


def _watch(program: str, pid: int, file: Path) -> subprocess.Popen[bytes]:
    file.unlink(missing_ok=True)
    command = [program, "record", "--pid", str(pid), "--output", str(file), "--format", "raw"]
    command += ["--rate", str(RATE), "--duration", "86400", "--threads", "--idle"]
    command += ["--nonblocking", "--full-filenames"]
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
