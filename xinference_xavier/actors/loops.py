"""Event loops on threads of our own that end however xoscar's calls take their cancellation.

A call to an actor answers the first cancellation by telling the actor's process of it and waiting
for the reply, so that one to a stopped process never ends; ``asyncio.run`` cancels once only and
then waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

#: How long tasks may take to end once the main one has, and how often they are told to.
LEAVE_SECONDS = 5.0
INSIST_SECONDS = 0.05


def run_and_leave(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` on a new event loop of the calling thread, then end whatever still runs there.

    Returns at most ``LEAVE_SECONDS`` after ``main`` has ended; raises what it raised.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        try:
            loop.run_until_complete(_end_tasks(loop))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    deadline = loop.time() + LEAVE_SECONDS
    while left := asyncio.all_tasks(loop) - {asyncio.current_task(loop)}:
        if loop.time() > deadline:
            logger.debug("Left behind on an event loop that ends: %s", left)
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=INSIST_SECONDS)
