"""The thread that schedules, and that runs the model, calls no actor and waits for no byte."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from faults import LENGTH, HeldReads, owner_and_reader, quiet
from shapes import BLOCK, HYBRID, TP2, Shape
from sharing_cluster import Cluster, ask, finish
from test_bytes import prompt

from xinference_xavier.actors.lender import KEYS_PER_SLICE, Lender
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.leases import NOT_NOW, Leases
from xinference_xavier.policy.planner import Planner

pytestmark = quiet

#: Modules of which a stepping thread may run nothing, and what it may.
FORBIDDEN = ("xoscar", "nixl", "asyncio", "concurrent.futures", "selectors", "socket", "queue")
ALLOWED = {
    ("asyncio.base_events", name)
    for name in ("call_soon_threadsafe", "_check_closed", "_call_soon", "get_debug")
} | {
    ("asyncio.events", "__init__"),
    ("asyncio.selector_events", "_write_to_self"),
    ("queue", "put"),  # a job for the copier
    ("socket", "send"),  # one byte that wakes the bridge; its pipe is non-blocking
}


@contextmanager
def watched() -> Iterator[Counter[tuple[str, str]]]:
    """Every function of ``FORBIDDEN`` modules that this thread runs, Python's or C's."""
    seen: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            module = getattr(argument, "__module__", None) or type(owner).__module__
            name = argument.__name__
        else:
            return
        if module == "time" and name == "sleep":
            seen[module, name] += 1
        if module.removeprefix("_").startswith(FORBIDDEN):
            seen[module.removeprefix("_"), name] += 1

    # The collector would run other threads' finalizers, and all they call, on this one.
    gc.disable()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        gc.enable()


@pytest.mark.parametrize("shape", [TP2, HYBRID], ids=["tp2", "hybrid"])
def test_nothing_is_called_and_waited_for_while_stepping(
    quick_cluster: Cluster, shape: Shape
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader)
    with watched() as seen:
        hit = reader.ask(prompt(1, LENGTH))
        for _ in range(5):
            reader.step()
    held.wait()
    held.land()
    with watched() as seen_after:
        deadline = time.monotonic() + 20
        while reader.busy and time.monotonic() < deadline:
            reader.step()
        reader.ask(prompt(3, LENGTH))
        for _ in range(3):
            reader.step()
        owner.ask(prompt(1, LENGTH))
        for _ in range(5):
            owner.step()
    finish(reader)
    finish(owner)
    assert reader.asked[hit].cached == 5 * BLOCK
    assert seen["asyncio.base_events", "call_soon_threadsafe"] == 1  # the watch sees something
    called = {*seen, *seen_after} - ALLOWED
    assert not called


def test_the_watch_sees_calls_and_waits() -> None:
    import asyncio
    import queue

    with watched() as seen:
        asyncio.run(asyncio.sleep(0))
        queue.Queue().put(1)
        queue.SimpleQueue().put(1)
        time.sleep(0)
    assert {("queue", "put"), ("time", "sleep"), ("asyncio.runners", "run")} <= set(seen)


def test_a_step_beside_a_fetch_takes_no_longer(quick_cluster: Cluster) -> None:
    """However long the read takes."""
    _, reader = owner_and_reader(quick_cluster, TP2)
    held = HeldReads(reader)
    reader.ask(prompt(1, LENGTH))
    held.wait()
    began = time.monotonic()
    other = reader.ask(prompt(2, LENGTH), 5)
    for _ in range(50):
        reader.step()
        if reader.asked[other].finished:
            break
    assert reader.asked[other].finished == "length"
    assert time.monotonic() - began < 1.0
    held.land()
    finish(reader)
    ask(reader, prompt(1, LENGTH))


class TimedLock:
    """A lock that knows how long it was held each time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held_seconds: list[float] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.held_seconds.append(time.perf_counter() - self._began)
        self._lock.release()


def test_a_large_lease_is_granted_in_slices() -> None:
    """4,000 keys: the scheduler thread finds the lock free in between."""
    import asyncio

    count = 4_000
    index = SnapshotIndex(4 * count, 0)
    planner = Planner(index, 0)
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(count)]
    planner.commit_store(planner.admit(keys, 1, set()), ok=True)
    leases, lock = Leases(index), TimedLock()
    lender = Lender(lock, lambda: leases)  # type: ignore[arg-type]

    async def lend() -> None:
        lease_id, found = await lender.lease("peer", keys, 30.0)
        assert all(location > NOT_NOW for location in found)
        assert await lender.release(lease_id)

    asyncio.run(lend())
    assert len(lock.held_seconds) == 2 * -(-count // KEYS_PER_SLICE) + 2
    index.validate()
