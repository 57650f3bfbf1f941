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


class ShareEntry(TypedDict):
    """What decides with whom a replica shares."""

    #: Names the process; a restarted replica is another member.
    member: str
    #: Members of one scope share; None: with nobody, and ``problem`` says why.
    scope: str | None
    problem: str | None
    #: The fields of the namespace, to say which one differs.
    namespace: dict[str, str]
    #: Where a loopback address means the same.
    machine: str


class PeerEntry(TypedDict):
    """One replica to another."""

    member: str
    model_uid: str
    replica: int
    address: str
    machine: str


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
    #: How it shares; None while it starts.
    share: ShareEntry | None


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

    def peers(self, entry: ReplicaEntry, now: float) -> list[PeerEntry]:
        """The living replicas that ``entry`` shares with."""
        own = entry["share"]
        if own is None or own["scope"] is None:
            return []
        found = []
        for record in self._records.values():
            other, share = record.entry, record.entry["share"]
            if share is None or not other["address"] or not self._alive(record, now):
                continue
            if share["scope"] == own["scope"] and share["member"] != own["member"]:
                found.append(_as_peer(other, share, other["address"]))
        return found

    def entry_of(self, member: str, now: float) -> ReplicaEntry | None:
        """The living replica of this name."""
        for record in self._records.values():
            share = record.entry["share"]
            if share is not None and share["member"] == member and self._alive(record, now):
                return record.entry
        return None

    def members(self, now: float) -> set[str]:
        """All living members."""
        shares = (r.entry["share"] for r in self._records.values() if self._alive(r, now))
        return {share["member"] for share in shares if share is not None}

    def _alive(self, record: _Record, now: float) -> bool:
        return now - record.heard_seconds < self._expire_seconds


def _as_peer(entry: ReplicaEntry, share: ShareEntry, address: str) -> PeerEntry:
    return PeerEntry(
        member=share["member"],
        model_uid=entry["model_uid"],
        replica=entry["replica"],
        address=address,
        machine=share["machine"],
    )
