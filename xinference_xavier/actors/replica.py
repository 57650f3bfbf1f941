"""One replica's face to the cluster: statistics on request.

Covers: the actor. Does not cover: its pool and its heartbeats (``bridge.py``), what the
statistics hold (the engine layer). Runs on the bridge's event loop in vLLM's EngineCore process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xoscar as xo

REPLICA_UID = "xinference_xavier_replica"

StatsCallable = Callable[[], dict[str, Any]]


class ReplicaActor(xo.StatelessActor):
    """Answers for one replica.

    ``stats`` is called on the pool's event loop, beside the scheduler thread: it must be quick
    and safe to call from another thread.
    """

    def __init__(self, stats: StatsCallable) -> None:
        super().__init__()
        self._stats = stats

    @classmethod
    def default_uid(cls) -> str:
        return REPLICA_UID

    def stats(self) -> dict[str, Any]:
        return self._stats()
