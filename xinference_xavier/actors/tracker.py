"""The tracker: one actor in the supervisor's pool that knows every replica and what it holds.

Covers: the actor and how any process finds it. Does not cover: its rules (``registry.py``,
``policy/directory.py``), and making it when the supervisor starts (``host/supervisor.py``). Runs on
the event loop of Xinference's supervisor, so every method returns at once. It keeps nothing on
disk: after a supervisor restart the replicas' heartbeats and batches fill it again.

What grows with the replicas is answered as one pickle: xoscar makes a message of more than 100
objects in the event loop's thread pool, of which the supervisor's process of Xinference 4.1 keeps
six threads busy for good. On two cores there are no others, and such an answer would never leave.
"""

from __future__ import annotations

import pickle
import secrets
import time
from typing import TypedDict

import xoscar as xo
from xoscar.errors import ActorAlreadyExist, ActorNotExist

from xinference_xavier.policy.directory import Batch, Directory

from .outbox import Outbox
from .reach import reach
from .registry import EXPIRE_SECONDS, PeerEntry, ReplicaEntry, ReplicaRegistry
from .token import share_token

TRACKER_UID = "xinference_xavier_tracker"

SECRET_BYTES = 32


class HeartbeatReply(TypedDict):
    """What a replica learns from its heartbeat."""

    #: The replicas that it shares with.
    peers: list[PeerEntry]
    #: Number of each member's latest batch, the own one's too: what was lost shows in them.
    numbers: dict[str, int]


class TrackerActor(xo.StatelessActor):
    """``ReplicaRegistry`` and ``Directory`` as an actor."""

    def __init__(self, expire_seconds: float = EXPIRE_SECONDS) -> None:
        super().__init__()
        self._registry = ReplicaRegistry(expire_seconds)
        self._directory = Directory()
        self._outboxes: dict[str, Outbox] = {}
        self._secret: bytes | None = None

    @classmethod
    def default_uid(cls) -> str:
        return TRACKER_UID

    # -- registry ----------------------------------------------------------------------------

    def heartbeat(self, entry: ReplicaEntry, secret: bytes | None = None) -> bytes:
        """A replica is there; ``secret`` is the cluster's, for a tracker that came back empty.

        Returns a pickled ``HeartbeatReply``.
        """
        if secret is not None:
            self.secret(secret)
        now = time.monotonic()
        self._registry.heartbeat(entry, now)
        self._forget_the_dead(now)
        peers = self._registry.peers(entry, now)
        members = [peer["member"] for peer in peers]
        if entry["share"] is not None:
            members.append(entry["share"]["member"])
        reply = HeartbeatReply(peers=peers, numbers=self._directory.numbers(members))
        return pickle.dumps(reply)

    def forget(self, model_uid: str, replica: int, started: float) -> bool:
        gone = self._registry.forget(model_uid, replica, started)
        self._forget_the_dead(time.monotonic())
        return gone

    def replicas(self, model_uid: str | None = None) -> bytes:
        """The registry's entries, a pickled list of dictionaries."""
        return pickle.dumps(self._registry.replicas(time.monotonic(), model_uid))

    def secret(self, offered: bytes | None = None) -> bytes:
        """The cluster's secret, from which block hashes and share tokens derive.

        Made once. A tracker that came back empty takes the one that a living replica offers.
        """
        if self._secret is None:
            self._secret = offered or secrets.token_bytes(SECRET_BYTES)
        return self._secret

    def _forget_the_dead(self, now: float) -> None:
        living = self._registry.members(now)
        for member in self._directory.members() - living:
            self._directory.forget(member)
        for member in self._outboxes.keys() - living:
            self._outboxes.pop(member).close()

    # -- directory ---------------------------------------------------------------------------

    def publish(self, batch: Batch) -> bool:
        """What a replica holds now; passed on to those it shares with.

        False: the replica is not known here, or an earlier batch is missing. Then it must publish
        again from number 0, after a heartbeat.
        """
        now = time.monotonic()
        entry = self._registry.entry_of(batch.member, now)
        scope = entry["share"]["scope"] if entry is not None and entry["share"] else None
        if entry is None or scope is None or not self._directory.publish(scope, batch):
            return False
        for peer in self._registry.peers(entry, now):
            self._outbox(peer, scope).put(batch)
        return True

    def snapshot(self, scope: str, member: str) -> tuple[int, bytes] | None:
        """All that a member holds, with the number of its latest batch; None if unknown."""
        return self._directory.snapshot(scope, member)

    def _outbox(self, peer: PeerEntry, scope: str) -> Outbox:
        known = self._outboxes.get(peer["member"])
        if known is None or known.address != peer["address"]:
            known = Outbox(peer["address"], share_token(self.secret(), scope))
            self._outboxes[peer["member"]] = known
        return known


async def find_tracker(supervisor_address: str) -> xo.ActorRefType[TrackerActor] | None:
    """Reference to the tracker, or None when nobody has made it yet.

    A remote call: keep the reference. It stays good when the supervisor restarts on its address
    and somebody has made the tracker again.
    """
    try:
        return await reach(TRACKER_UID, supervisor_address)
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
