"""Which replicas keep a snapshot cache, and what they said last.

Covers: entries, their order, their expiry. Does not cover: how heartbeats arrive
(``tracker.py``). Plain Python with the clock passed in, so that it needs no actor and no waiting
to be tested. Used from one event loop only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

#: An entry nobody has confirmed for this long is gone.
EXPIRE_SECONDS = 30.0


class ReplicaEntry(TypedDict):
    """What a replica says about itself in each heartbeat."""

    model_uid: str
    replica: int
    #: ``starting`` (the engine loads; ``address`` is None) or ``running``.
    state: str
    #: Address of the actor pool with its ``ReplicaActor``.
    address: str | None
    pid: int
    #: Wall clock seconds; the entry with the later start owns the replica's place.
    started: float
    #: Launch options as plain data.
    options: dict[str, Any]
    #: The engine's statistics, or None before the first.
    stats: dict[str, Any] | None


@dataclass
class _Record:
    entry: ReplicaEntry
    heard_seconds: float


class ReplicaRegistry:
    """Replicas by (model uid, replica number). All times are monotonic seconds of one clock."""

    def __init__(self, expire_seconds: float = EXPIRE_SECONDS) -> None:
        self._expire_seconds = expire_seconds
        self._records: dict[tuple[str, int], _Record] = {}

    def heartbeat(self, entry: ReplicaEntry, now: float) -> bool:
        """Insert or refresh one entry.

        Returns False, and changes nothing, when a process that started later owns the place: a
        restarted replica is not overwritten by its predecessor's last words.
        """
        key = (entry["model_uid"], entry["replica"])
        known = self._records.get(key)
        if known is not None and self._alive(known, now):
            if known.entry["started"] > entry["started"]:
                return False
            if entry["stats"] is None and known.entry["pid"] == entry["pid"]:
                entry = ReplicaEntry(**{**entry, "stats": known.entry["stats"]})
        self._records[key] = _Record(entry, now)
        return True

    def forget(self, model_uid: str, replica: int, started: float) -> bool:
        """Remove an entry unless a process that started later than ``started`` owns it."""
        known = self._records.get((model_uid, replica))
        if known is None or known.entry["started"] > started:
            return False
        del self._records[model_uid, replica]
        return True

    def replicas(self, now: float, model_uid: str | None = None) -> list[dict[str, Any]]:
        """Living entries in order of uid and replica, each with ``heartbeat_age_seconds``."""
        self._records = {k: r for k, r in self._records.items() if self._alive(r, now)}
        return [
            {**record.entry, "heartbeat_age_seconds": round(now - record.heard_seconds, 3)}
            for (uid, _), record in sorted(self._records.items())
            if model_uid is None or uid == model_uid
        ]

    def _alive(self, record: _Record, now: float) -> bool:
        return now - record.heard_seconds < self._expire_seconds
