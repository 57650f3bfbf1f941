"""vLLM's NixlConnector with a NIXL progress thread that pauses between its looks.

NIXL's Python class fixes the pause at 0: the thread takes a whole core, which on a machine of two
is half of what computes. The mode ``nixl-calm`` is the pair without that, to tell the connector's
speed from the thread's price. Imported by vLLM in the scheduler's and the workers' processes, by
name.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.distributed import nixl_utils
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

PAUSE_MICROSECONDS = 1000


class CalmNixlConnector(NixlConnector):  # type: ignore[misc]
    """Makes its agents with a pause."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _pause(sys.modules[nixl_utils.NixlWrapper.__module__].nixlBind)
        super().__init__(*args, **kwargs)


def _pause(bindings: Any) -> None:
    """Let agents made from now on have the pause; once a process is enough."""
    make = bindings.nixlAgent
    if getattr(make, "pauses", False):
        return

    def paused(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_MICROSECONDS
        return make(name, config)

    paused.pauses = True  # type: ignore[attr-defined]
    bindings.nixlAgent = paused
