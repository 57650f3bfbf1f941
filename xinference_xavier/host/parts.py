"""What joins Xinference's API from the layer above: its name, and what it is given.

The layer ``ui`` imports this one, so this one names it, as ``bootstrap.py`` names hooks, and
imports it when the API starts. Runs in Xinference's API process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from xinference_xavier.host.admin import Admin
from xinference_xavier.host.sampler import Sampler

logger = logging.getLogger(__name__)

#: "module:function", called with ``Parts``. The only name of an upper layer below it.
ADD_ON = "xinference_xavier.ui:join"

#: Scopes of the host that our routes ask for.
READ_SCOPE = "models:list"
WRITE_SCOPE = "models:write"


@dataclass(frozen=True)
class Parts:
    """One API process.

    ``app``: the host's application, while its routes are being registered, before the catch-all
    route of its web UI. ``auth_service``: the host's, None when authentication is off.
    """

    app: Any
    auth_service: Any | None
    sampler: Sampler
    admin: Admin


def join(parts: Parts) -> None:
    """Let the layer above join. Its failure is logged, and takes nothing else with it."""
    module, _, function = ADD_ON.partition(":")
    try:
        getattr(import_module(module), function)(parts)
    except Exception as error:
        logger.warning(
            "The panel at /xavier/ is not available (%s: %s). Everything else works.",
            type(error).__name__,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
