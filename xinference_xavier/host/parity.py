"""Who shares with whom, and why not: said from what replicas told the tracker.

Covers: comparing scopes and naming the fields of two namespaces that differ. Does not cover
asking the tracker (``view.py``). Pure functions of the tracker's entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel


class PeerName(BaseModel):
    """A replica."""

    model_uid: str
    replica: int


class Difference(PeerName):
    """A replica with which this one does not share: ``fields`` of their namespaces that differ,
    each with both values, this replica's first; or the ``reason``."""

    fields: dict[str, tuple[str | None, str | None]]
    reason: str | None = None

    @property
    def why(self) -> str:
        """The reason, or the fields that differ, in words."""
        return self.reason or "; ".join(
            f"{name} is {mine or 'missing'} here and {theirs or 'missing'} there"
            for name, (mine, theirs) in self.fields.items()
        )


class ShareView(BaseModel):
    """How one replica shares. ``problem`` says why with nobody."""

    scope: str | None
    problem: str | None
    namespace: dict[str, str]
    shares_with: list[PeerName]
    not_with: list[Difference]


def share_view(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> ShareView | None:
    """The view of ``entry`` among all ``entries``; None while its engine starts.

    ``not_with`` names the other replicas of its model, and with ``xavier_share=cluster`` those of
    all models that chose the same.
    """
    own = entry["share"]
    if own is None:
        return None
    shares_with, not_with = [], []
    for other in entries:
        theirs = other["share"]
        if theirs is None or theirs["member"] == own["member"]:
            continue
        name = {"model_uid": other["model_uid"], "replica": other["replica"]}
        if own["scope"] is not None and own["scope"] == theirs["scope"]:
            shares_with.append(PeerName(**name))
        elif _meant_to_share(entry, other):
            not_with.append(Difference(**name, **_why(own, theirs)))
    return ShareView(
        scope=own["scope"],
        problem=own["problem"],
        namespace=own["namespace"],
        shares_with=shares_with,
        not_with=not_with,
    )


def _meant_to_share(entry: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    modes = {each["options"].get("xavier_share") for each in (entry, other)}
    return bool(entry["model_uid"] == other["model_uid"] or modes == {"cluster"})


def _why(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    mine, others = own["namespace"], theirs["namespace"]
    fields = {
        name: (mine.get(name), others.get(name))
        for name in sorted(mine.keys() | others.keys())
        if mine.get(name) != others.get(name)
    }
    problem = own["problem"] or theirs["problem"]
    reason = problem or (None if fields else "xavier_share differs between the launches")
    return {"fields": fields, "reason": reason}
