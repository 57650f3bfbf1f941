"""What an operator does to a replica of the harness, and waiting for its end while stepping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from checks import check_step
from harness import Replica

from xinference_xavier.engine.steering import Steering
from xinference_xavier.types import Tier

WAIT_SECONDS = 20.0


def steering_of(replica: Replica) -> Steering:
    return replica.connector._steering


def steer(
    replica: Replica, call: Callable[[Steering], Coroutine[Any, Any, Any]], seconds: float = 10
) -> Any:
    """An operator's call, on a thread with a loop like the bridge's. The replica takes steps only
    when its connector wants them, as an idle engine that is woken."""

    async def run() -> Any:
        return await asyncio.wait_for(call(steering_of(replica)), seconds)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asyncio.run, run())
        deadline = time.monotonic() + WAIT_SECONDS
        while not answer.done():
            assert time.monotonic() < deadline
            replica.step()
            check_step(replica)
            time.sleep(0.001)
        return answer.result()


def begin(replica: Replica, command: Callable[[], Any]) -> Future[Any]:
    """A command for the next step."""
    future: Future[Any] = Future()
    steering_of(replica)._commands.append((command, future))
    return future


def begin_resize(replica: Replica, **rows: int) -> Future[Any]:
    """Change the tiers ``gpu`` and ``cpu`` to so many rows, from the next step on."""
    size = replica.manager.rank_row_bytes * replica.manager.ranks
    asked = {Tier[name.upper()]: count * size for name, count in rows.items()}
    return begin(replica, lambda: steering_of(replica)._begin(asked, 2**60))


def finish_changes(replica: Replica) -> None:
    """Step until no tier is being changed."""
    deadline = time.monotonic() + WAIT_SECONDS
    while steering_of(replica)._resizes.changes or steering_of(replica)._commands:
        assert time.monotonic() < deadline, steering_of(replica)._resizes.changes
        steering_of(replica)._nudged = True
        replica.step()
        check_step(replica)
        time.sleep(0.0005)
