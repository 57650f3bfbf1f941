"""Tells what streams for long that the host's server wants to end.

Covers: the hook on ``xinference.deploy.api_worker``, whose server ends or is replaced (an API
relaunch) only when every connection has closed. Does not cover what ends a stream
(``ui/streams.py``). Runs on the event loop of Xinference's API process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

#: Path of what streams for long; its connections may be closed as soon as they are idle.
_PATH = "/xavier"

_callbacks: list[Callable[[], object]] = []


def on_drain(callback: Callable[[], object]) -> None:
    """Call ``callback`` whenever the host's server begins to drain, which may be said twice.

    It may run in a signal handler, on the thread of the event loop: it must be quick.
    """
    _callbacks.append(callback)


def on_api_worker(module: ModuleType) -> None:
    """Wrap ``HostedServer.begin_drain``."""
    original = module.HostedServer.begin_drain
    if getattr(original, "_tells_streams", False):
        return

    @functools.wraps(original)
    def begin_drain(self: Any) -> None:
        original(self)
        try:
            _tell(self)
        except Exception:  # the server ends as without us, after its connections have
            logger.warning("Ending the panel's streams failed", exc_info=True)

    begin_drain._tells_streams = True  # type: ignore[attr-defined]
    module.HostedServer.begin_drain = begin_drain


def _tell(server: Any) -> None:
    for callback in tuple(_callbacks):
        callback()
    for connection in tuple(server.server_state.connections):
        scope = getattr(connection, "scope", None) or {}
        if str(scope.get("path", "")).startswith(_PATH):
            connection.shutdown()  # at once when idle, else with the answer under way
