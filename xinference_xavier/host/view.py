"""What the cluster's replicas say, gathered for the REST API.

Covers: finding replicas by the tracker and asking each for its statistics. Does not cover:
routes and authentication (``api.py``). Runs on the event loop of Xinference's API process; every
question has a time-out, and a replica that does not answer is shown by its last heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any, NamedTuple

import xoscar as xo
from pydantic import BaseModel

from xinference_xavier.actors.reach import reach
from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.actors.tracker import find_tracker
from xinference_xavier.host.parity import ShareView, share_view

logger = logging.getLogger(__name__)

#: How long one replica may take to answer.
REPLICA_SECONDS = 1.0
#: How long the tracker may take.
TRACKER_SECONDS = 3.0


class ReplicaView(BaseModel):
    """One replica. ``stats`` is the engine's own report, None while it starts."""

    replica: int
    state: str
    address: str | None
    pid: int
    started: float
    heartbeat_age_seconds: float
    #: True when the replica did not answer, and ``stats`` are from its last heartbeat.
    stale: bool
    options: dict[str, Any]
    #: With whom it shares; None while its engine starts.
    share: ShareView | None
    stats: dict[str, Any] | None


class ModelView(BaseModel):
    """One model. ``detail`` says why ``replicas`` is empty, else it is None."""

    model_uid: str
    enabled: bool
    detail: str | None = None
    replicas: list[ReplicaView]


class CacheView(BaseModel):
    """All models whose replicas report a snapshot cache."""

    models: list[ModelView]


class KnownModel(NamedTuple):
    """A model as the supervisor knows it: why it did not start, if so, and the numbers of its
    replicas, empty where it does not say."""

    error: str | None
    replicas: frozenset[int]


class ClusterView:
    """Asks the tracker and the replicas. One per API process.

    ``known_models`` answers with each model the supervisor runs, starts or failed to start, by uid.
    """

    def __init__(
        self, supervisor_address: str, known_models: Callable[[], Awaitable[dict[str, KnownModel]]]
    ) -> None:
        self._supervisor_address = supervisor_address
        self._known_models = known_models
        self._tracker: Any = None
        #: Making a reference is a remote call, so they are kept, by replica address.
        self._replicas: dict[str, Any] = {}

    async def models(self, model_uid: str | None = None) -> list[ModelView]:
        """Models known to the tracker, or the one named; replicas answer in parallel.

        Raises whatever the connection to the supervisor raises, ``TimeoutError`` among it.
        """
        known = await self._entries()
        self._keep_references({entry["address"] for entry in known})
        entries = [e for e in known if model_uid is None or e["model_uid"] == model_uid]
        answers = await asyncio.gather(*(self._stats(entry["address"]) for entry in entries))
        pairs = list(zip(entries, answers, strict=True))
        silent = {_place(e) for e, fresh in pairs if fresh is None and e["address"] is not None}
        gone = await self._terminated(silent)
        known = [entry for entry in known if _place(entry) not in gone]
        living = [(entry, fresh) for entry, fresh in pairs if _place(entry) not in gone]
        return [
            ModelView(
                model_uid=uid,
                enabled=True,
                replicas=[_view(entry, fresh, known) for entry, fresh in group],
            )
            for uid, group in groupby(living, key=lambda pair: pair[0]["model_uid"])
        ]

    async def places(self, model_uid: str) -> list[tuple[int, str | None]]:
        """Number and address of each replica of one model. Raises as ``models``."""
        entries = await self._entries()
        return [(e["replica"], e["address"]) for e in entries if e["model_uid"] == model_uid]

    async def _terminated(self, silent: set[tuple[str, int]]) -> set[tuple[str, int]]:
        """Those of ``silent``, replicas by uid and number, that the supervisor has terminated.

        vLLM kills an engine that takes long to stop, whose entry then stays until it expires. While
        the supervisor does not answer, all count as living.
        """
        if not silent:
            return set()
        try:
            known: dict[str, KnownModel]
            known = await xo.wait_for(self._known_models(), TRACKER_SECONDS)
        except Exception as error:
            logger.debug("Asking which models are running failed: %r", error)
            return set()
        return {
            (uid, replica)
            for uid, replica in silent
            if uid not in known or (known[uid].replicas and replica not in known[uid].replicas)
        }

    async def _entries(self) -> list[dict[str, Any]]:
        """The tracker's list; empty while no replica has made a tracker."""
        if self._tracker is None:
            finding = find_tracker(self._supervisor_address)
            self._tracker = await xo.wait_for(finding, TRACKER_SECONDS)
        if self._tracker is None:
            return []
        try:
            asked = self._tracker.replicas()
            packed: bytes = await xo.wait_for(asked, TRACKER_SECONDS)
        except xo.ActorNotExist:  # the supervisor restarted, and no replica has beaten since
            return []
        except Exception:
            self._tracker = None
            raise
        found: list[dict[str, Any]] = pickle.loads(packed)
        return found

    async def _stats(self, address: str | None) -> dict[str, Any] | None:
        """A replica's statistics now, or None when it does not answer in time."""
        if address is None:
            return None
        try:
            answer: dict[str, Any] = await xo.wait_for(self._ask(address), REPLICA_SECONDS)
        except Exception:
            self._replicas.pop(address, None)
            return None
        return answer

    async def _ask(self, address: str) -> dict[str, Any]:
        if address not in self._replicas:
            self._replicas[address] = await reach(REPLICA_UID, address)
        answer: dict[str, Any] = await self._replicas[address].stats()
        return answer

    def _keep_references(self, addresses: set[str | None]) -> None:
        """Drop references to replicas that are gone."""
        self._replicas = {a: ref for a, ref in self._replicas.items() if a in addresses}


def _place(entry: dict[str, Any]) -> tuple[str, int]:
    return entry["model_uid"], entry["replica"]


def _view(
    entry: dict[str, Any], fresh: dict[str, Any] | None, known: list[dict[str, Any]]
) -> ReplicaView:
    """One replica; ``fresh`` are its statistics, None if it did not answer."""
    given = entry["stats"] if fresh is None else fresh
    stale = fresh is None and entry["address"] is not None
    share = share_view(entry, known)
    fields = {**entry, "stats": given, "stale": stale, "share": share}
    return ReplicaView(**{name: fields[name] for name in ReplicaView.model_fields})
