"""The tracker's place: made by Xinference's supervisor, in its own pool, when it starts.

Covers: the hook on ``xinference.core.supervisor``. Does not cover: the tracker itself
(``actors/tracker.py``). Runs on the supervisor's event loop. No other process makes the first
tracker, since a supervisor without this package would log an error for each attempt.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)


def on_supervisor(module: ModuleType) -> None:
    """Wrap ``SupervisorActor.__post_create__`` to make the tracker beside it."""
    actor: Any = module.SupervisorActor
    original = actor.__post_create__
    if getattr(original, "_makes_tracker", False):
        return

    @functools.wraps(original)
    async def __post_create__(self: Any) -> None:  # noqa: N807
        await original(self)
        await _make_tracker(self.control_address)

    __post_create__._makes_tracker = True  # type: ignore[attr-defined]
    actor.__post_create__ = __post_create__


async def _make_tracker(address: str) -> None:
    """Make the tracker; without one models work, and only ``/v1/xavier`` stays empty."""
    from xinference_xavier.actors.tracker import get_or_create_tracker

    try:
        await get_or_create_tracker(address)
    except Exception as error:
        logger.warning(
            "Making the tracker at %s failed (%s: %s): /v1/xavier will show nothing",
            address,
            type(error).__name__,
            error,
        )
