"""A thread's event loop ends although calls to actors are under way."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import xoscar as xo
from pool_process import PoolProcess

from xinference_xavier.actors import loops
from xinference_xavier.actors.loops import run_and_leave
from xinference_xavier.actors.tracker import find_tracker

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


@pytest.fixture
def tracker_pool() -> Iterator[PoolProcess]:
    pool = PoolProcess(tracker=True)
    yield pool
    pool.kill()


def test_a_call_to_a_stopped_process_does_not_keep_the_loop(tracker_pool: PoolProcess) -> None:
    calls: list[asyncio.Task[object]] = []

    async def call() -> None:
        tracker = await find_tracker(tracker_pool.address)
        assert tracker is not None
        os.kill(tracker_pool.process.pid or 0, signal.SIGSTOP)
        calls.append(asyncio.ensure_future(xo.has_actor(tracker)))
        await asyncio.sleep(0.2)

    thread = threading.Thread(target=lambda: run_and_leave(call()), daemon=True)
    thread.start()
    thread.join(loops.LEAVE_SECONDS / 2)
    assert not thread.is_alive()
    assert calls[0].exception() is not None


def test_what_never_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LEAVE_SECONDS", 0.2)
    told: list[int] = []
    kept: list[asyncio.Task[None]] = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                told.append(1)

    async def begin() -> None:
        kept.append(asyncio.ensure_future(stubborn()))
        await asyncio.sleep(0)

    run_and_leave(begin())
    assert len(told) > 1


def test_what_the_main_task_raises_is_raised() -> None:
    async def fail() -> None:
        raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        run_and_leave(fail())
