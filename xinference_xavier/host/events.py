"""What happened between two samples, in sentences. Pure functions of what ``view.py`` gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xinference_xavier.host.summary import faults_of
from xinference_xavier.host.view import ModelView, ReplicaView

#: A burst: this share of the GPU tier demoted between two samples, and at least so many.
BURST_SHARE, BURST_LEAST = 0.25, 16

_FAULTS = {
    "copy": "Failed copies: {}. What they held is computed.",
    "mismatch": "Loads whose bytes were not those stored: {}. They are computed again.",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth a line.

    ``at``: Unix seconds. ``model_uid``: "" for what concerns no model. ``replica``: None for what
    concerns none. ``kind``: ``replica_up``, ``replica_gone``, ``replica_restarted``,
    ``demotion_burst``, ``fault``, ``parity``, ``not_answering`` or ``answering``.
    """

    at: float
    model_uid: str
    replica: int | None
    kind: str
    text: str


Replicas = dict[tuple[str, int], ReplicaView]


def changes(before: Sequence[ModelView], now: Sequence[ModelView], at: float) -> list[Event]:
    """Events between two samples of all models."""
    old, new = _replicas(before), _replicas(now)
    found: list[tuple[tuple[str, int], str, str]] = []
    for key in sorted(old.keys() | new.keys()):
        found += ((key, kind, text) for kind, text in _changes(old.get(key), new.get(key)))
    return [Event(at, uid, replica, kind, text) for (uid, replica), kind, text in found]


def _replicas(models: Sequence[ModelView]) -> Replicas:
    return {(m.model_uid, r.replica): r for m in models for r in m.replicas}


def _changes(old: ReplicaView | None, new: ReplicaView | None) -> Iterator[tuple[str, str]]:
    if new is None:
        yield "replica_gone", "The replica is gone."
        return
    if old is None or (old.state, new.state) == ("starting", "running"):
        yield "replica_up", f"The replica is {new.state}."
    elif old.started != new.started:
        yield "replica_restarted", "The replica has restarted: its tiers are empty."
    yield from _parity(old, new)
    if old is None or old.started != new.started or old.stats is None or new.stats is None:
        return
    yield from _faults(old, new)
    yield from _burst(old, new)


def _parity(old: ReplicaView | None, new: ReplicaView) -> Iterator[tuple[str, str]]:
    """Peers with which it turned out not to share."""
    known = {(p.model_uid, p.replica) for p in old.share.not_with} if old and old.share else set()
    for peer in new.share.not_with if new.share is not None else ():
        if (peer.model_uid, peer.replica) in known:
            continue
        yield "parity", f"It does not share with {peer.model_uid}/{peer.replica}: {peer.why}"


def _faults(old: ReplicaView, new: ReplicaView) -> Iterator[tuple[str, str]]:
    assert old.stats is not None
    assert new.stats is not None
    before = faults_of([old.stats])
    for reason, count in faults_of([new.stats]).items():
        more = count - before.get(reason, 0)
        if more > 0:
            yield "fault", _fault(reason).format(more)


def _fault(reason: str) -> str:
    """The sentence for one of ``faults_of``'s reasons, with a place for the number."""
    if reason.startswith("internal_"):
        label = reason.removeprefix("internal_")
        return f"Errors in the cache ({label}): {{}}. Requests went on; the engine's log says more."
    label = reason.removeprefix("fetch_")
    fetch = f"Failed reads from peers ({label}): {{}}. Their blocks are computed."
    return _FAULTS.get(reason, fetch)


def _burst(old: ReplicaView, new: ReplicaView) -> Iterator[tuple[str, str]]:
    assert old.stats is not None
    assert new.stats is not None
    rows = new.stats["tiers"]["gpu"]["rows"]
    moved = new.stats["counters"]["demotions"] - old.stats["counters"]["demotions"]
    if moved >= max(BURST_LEAST, BURST_SHARE * rows):
        text = f"{moved} snapshots went to the CPU tier at once; the GPU tier has {rows} rows."
        yield "demotion_burst", text
