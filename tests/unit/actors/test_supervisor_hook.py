"""The supervisor makes the tracker. End-to-end tests do it with Xinference's own supervisor."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest
from pool_process import PoolProcess

from xinference_xavier.actors.tracker import find_tracker
from xinference_xavier.host import supervisor

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


def hooked(address: str) -> Any:
    class SupervisorActor:
        control_address = address
        started = 0

        async def __post_create__(self) -> None:
            self.started += 1

    module = types.ModuleType("xinference.core.supervisor")
    module.SupervisorActor = SupervisorActor  # type: ignore[attr-defined]
    supervisor.on_supervisor(module)
    supervisor.on_supervisor(module)
    return SupervisorActor()


def test_starting_supervisor_makes_the_tracker_once() -> None:
    pool = PoolProcess(tracker=False)

    async def run() -> Any:
        actor = hooked(pool.address)
        await actor.__post_create__()
        await actor.__post_create__()
        return actor.started, await find_tracker(pool.address)

    try:
        started, tracker = asyncio.run(run())
    finally:
        pool.kill()
    assert started == 2
    assert tracker is not None


def test_supervisor_starts_without_a_tracker_if_need_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = hooked("127.0.0.1:9")
    asyncio.run(actor.__post_create__())
    assert actor.started == 1
    assert "/v1/xavier will show nothing" in caplog.text
