"""vLLM's own loop, blocked in its queue of requests: a wake-up makes it ask for work, no more."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from xinference_xavier.engine import compat


class Scheduler:
    """Has work when the connector says so."""

    wants_step = False
    asked = 0

    def has_requests(self) -> bool:
        self.asked += 1
        return self.wants_step


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine with everything that the loop looks at between two steps, and no model."""
    monkeypatch.setattr(compat._Engine, "ref", staticmethod(lambda: None))
    compat.watch_for_wakes()
    made: Any = EngineCoreProc.__new__(EngineCoreProc)
    made.input_queue, made.aborts_queue = queue.Queue(), queue.Queue()
    made.engines_running, made.batch_queue = False, None
    made.shutdown_state = EngineShutdownState.RUNNING
    made.process_input_queue_block = True
    made._idle_state_callbacks = []
    made.scheduler = Scheduler()
    return made


def blocked(core: Any) -> threading.Thread:
    thread = threading.Thread(target=core._process_input_queue, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "an engine without work waits"
    return thread


def test_an_idle_engine_steps_when_it_is_woken_with_work(core: Any) -> None:
    thread = blocked(core)
    asked = core.scheduler.asked
    compat.wake()
    thread.join(0.2)
    assert thread.is_alive(), "without work it goes back to waiting"
    assert core.scheduler.asked > asked
    core.scheduler.wants_step = True
    compat.wake()
    thread.join(10)
    assert not thread.is_alive()
    assert core.input_queue.empty()


def test_nothing_happens_without_an_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat._Engine, "ref", staticmethod(lambda: None))
    compat.wake()


def test_the_loop_is_watched_once(core: Any) -> None:
    core.scheduler.wants_step = True
    core._process_input_queue()
    assert compat._Engine.ref() is core
    assert not hasattr(EngineCoreProc._process_input_queue.__wrapped__, "xavier"), "wrapped once"
