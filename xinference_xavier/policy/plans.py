"""Plans: what a job was given, kept until every rank has acknowledged it.

A plan holds keys and locations in one order, the order of the rows in the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xinference_xavier.types import Tier


@dataclass(slots=True)
class StorePlan:
    """Blocks of one request to be written to reserved rows."""

    keys: list[bytes] = field(default_factory=list)
    locations: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LoadPlan:
    """Snapshots pinned for one request. ``NOWHERE`` stands for a key that was gone."""

    mark: int
    keys: list[bytes]
    locations: list[int]
    #: Fetches that must have ended before these rows can be read.
    waits_for: frozenset[int] = frozenset()


@dataclass(slots=True)
class MovePlan:
    """Snapshots on their way to another row of tier ``to``: from the other tier, or, while ``to``
    shrinks, from its own rows that go."""

    to: Tier
    keys: list[bytes] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.keys)

    @property
    def relocates(self) -> bool:
        """Whether the snapshots stay in their tier."""
        return (self.sources[0] >= 0) == (self.targets[0] >= 0)


@dataclass(slots=True)
class FetchPlan:
    """Rows reserved for snapshots of one peer. Pinned until the bytes are there and, if
    ``held``, until the request that asked for them has loaded them."""

    fetch_id: int
    mark: int
    keys: list[bytes]
    locations: list[int]
    held: bool = True


Plan = StorePlan | LoadPlan | MovePlan
