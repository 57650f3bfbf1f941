"""Panel and web UI parts; installed as ``xinference_xavier.ui``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xinference_xavier.host.parts import Parts


def join(parts: Parts) -> None:
    """Add what this layer serves to one API process; called while its routes are registered."""
    from . import mount, webui

    webui.install(parts.app)
    mount.install(parts)
