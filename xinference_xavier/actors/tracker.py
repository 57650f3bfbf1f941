"""The tracker: one actor in the supervisor's pool that knows every replica of the cluster.

Covers: the actor and how any process finds it. Does not cover: its rules (``registry.py``), and
making it when the supervisor starts (``host/supervisor.py``). Runs on the event loop of
Xinference's supervisor, so every method returns at once. It keeps nothing on disk: after a
supervisor restart the replicas' heartbeats fill it again.
"""

from __future__ import annotations

import time
from typing import Any

import xoscar as xo
from xoscar.errors import ActorAlreadyExist, ActorNotExist

from .registry import EXPIRE_SECONDS, ReplicaEntry, ReplicaRegistry

TRACKER_UID = "xinference_xavier_tracker"


class TrackerActor(xo.StatelessActor):
    """``ReplicaRegistry`` as an actor."""

    def __init__(self, expire_seconds: float = EXPIRE_SECONDS) -> None:
        super().__init__()
        self._registry = ReplicaRegistry(expire_seconds)

    @classmethod
    def default_uid(cls) -> str:
        return TRACKER_UID

    def heartbeat(self, entry: ReplicaEntry) -> bool:
        return self._registry.heartbeat(entry, time.monotonic())

    def forget(self, model_uid: str, replica: int, started: float) -> bool:
        return self._registry.forget(model_uid, replica, started)

    def replicas(self, model_uid: str | None = None) -> list[dict[str, Any]]:
        return self._registry.replicas(time.monotonic(), model_uid)


async def find_tracker(supervisor_address: str) -> xo.ActorRefType[TrackerActor] | None:
    """Reference to the tracker, or None when nobody has made it yet.

    A remote call: keep the reference. It stays good when the supervisor restarts on its address
    and somebody has made the tracker again.
    """
    try:
        return await xo.actor_ref(uid=TRACKER_UID, address=supervisor_address)
    except ActorNotExist:
        return None


async def get_or_create_tracker(supervisor_address: str) -> xo.ActorRefType[TrackerActor]:
    """Reference to the tracker, made now if there was none; any number of callers may race.

    Only for a supervisor that is known to have this package: one without it logs an error for
    each attempt, and never answers. Raises whatever the connection raises.
    """
    try:
        return await xo.create_actor(TrackerActor, uid=TRACKER_UID, address=supervisor_address)
    except ActorAlreadyExist:
        return await xo.actor_ref(uid=TRACKER_UID, address=supervisor_address)
