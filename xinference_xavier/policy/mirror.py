"""What the other replicas hold, as one replica knows it: a copy of the tracker's directory.

Covers: batches in their order, snapshots after a gap, and who holds most of a prefix. Does not
cover the calls (``actors``). The bridge thread changes a mirror; the scheduler thread reads it
without a lock. An entry may be wrong or out of date: it costs a failed fetch, which is a miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from xinference_xavier.policy.directory import MEMBER_KEYS, Batch, apply_batch
from xinference_xavier.policy.fingerprints import (
    FingerprintSet,
    fingerprint,
    fingerprints,
    unpack,
)

#: Batches of one member kept while an earlier one is missing.
HELD_BATCHES = 2_048
#: Keys of a snapshot that are loaded in one go: about a millisecond.
SLICE_KEYS = 1_024
#: Keys of a lookup that are fingerprinted at once.
_LOOKUP_KEYS = 64


@dataclass(slots=True)
class _Mirrored:
    number: int = -1
    #: None before anything could be applied.
    keys: FingerprintSet | None = None
    #: Batches that cannot be applied yet, by number.
    held: dict[int, Batch] = field(default_factory=dict)
    #: Number of the snapshot that is being loaded, or -1.
    loading: int = -1


class _Visible(NamedTuple):
    keys: FingerprintSet
    #: The member's part of the hash that ranks the owners of a prefix.
    seed: int


class Mirror:
    """What the other members hold, as one replica knows it.

    The bridge thread changes it; ``longest``, ``holds`` and ``members`` belong to every thread,
    and take no lock.
    """

    def __init__(self, member_keys: int = MEMBER_KEYS, slice_keys: int = SLICE_KEYS) -> None:
        """``member_keys``: as for ``Directory``."""
        self._member_keys = member_keys
        self._slice_keys = slice_keys
        self._mirrored: dict[str, _Mirrored] = {}
        #: What readers see. Replaced as a whole, never changed.
        self._visible: dict[str, _Visible] = {}

    # -- the bridge thread ---------------------------------------------------------------------

    def apply(self, batch: Batch) -> bool:
        """Take in one batch, now or when those before it are there.

        False: an earlier one is missing, and the member's snapshot is wanted unless that batch is
        just late. Raises ``ValueError`` for fingerprints that are not whole.
        """
        member = self._mirrored.setdefault(batch.member, _Mirrored())
        if batch.number <= member.number:
            return True
        member.held[batch.number] = batch
        if len(member.held) > HELD_BATCHES:  # a snapshot to come has the oldest
            del member.held[min(member.held)]
        if member.loading >= 0 and not (batch.start and batch.number > member.loading):
            return True
        return self._catch_up(batch.member)

    def load(self, name: str, number: int, packed: bytes) -> Iterator[None]:
        """Take in a member's snapshot, one slice for each step of the iterator.

        What was known of the member before stays visible until the last step; batches that arrive
        meanwhile are applied in it. A snapshot that something newer has overtaken is dropped. To
        give up, close the iterator.
        """
        member = self._mirrored.setdefault(name, _Mirrored())
        if number <= max(member.number, member.loading):
            return
        member.loading = number
        try:
            values = unpack(packed)
            keys = FingerprintSet(self._member_keys, expected=len(values))
            for begin in range(0, len(values), self._slice_keys):
                yield
                if self._mirrored.get(name) is not member or member.loading != number:
                    return
                for value in values[begin : begin + self._slice_keys]:
                    keys.add(value)
            self._replace(name, number, keys)
        finally:
            if member.loading == number:
                member.loading = -1
        self._catch_up(name)

    def wanted(self, numbers: Mapping[str, int]) -> list[str]:
        """Those of ``numbers``, some or all of the tracker's, whose snapshot is wanted: what is
        known or being loaded is older. Finds what no later batch reveals."""
        known = self._mirrored
        return [
            name
            for name, number in numbers.items()
            if name not in known or max(known[name].number, known[name].loading) < number
        ]

    def drop(self, member: str) -> None:
        """The member is gone."""
        self._mirrored.pop(member, None)
        self._visible = {name: v for name, v in self._visible.items() if name != member}

    def forget_key(self, member: str, key: bytes) -> None:
        """The member turned out not to hold ``key``."""
        known = self._mirrored.get(member)
        if known is not None and known.keys is not None:
            known.keys.discard(fingerprint(key))

    def _catch_up(self, name: str) -> bool:
        """Apply what follows what is there; whether nothing is left."""
        member = self._mirrored[name]
        start = max((n for n, batch in member.held.items() if batch.start), default=-1)
        if start > member.number:
            self._replace(name, start - 1, FingerprintSet(self._member_keys))
        while member.keys is not None and member.number + 1 in member.held:
            apply_batch(member.keys, member.held.pop(member.number + 1))
            member.number += 1
        return not member.held

    def _replace(self, name: str, number: int, keys: FingerprintSet) -> None:
        member = self._mirrored[name]
        member.number, member.keys, member.loading = number, keys, -1
        member.held = {n: batch for n, batch in member.held.items() if n > number}
        self._visible = {**self._visible, name: _Visible(keys, _seed(name))}

    # -- every thread --------------------------------------------------------------------------

    def members(self) -> tuple[str, ...]:
        """Members whose keys are known."""
        return tuple(self._visible)

    def holds(self, member: str, key: bytes) -> bool:
        """Whether ``member`` seems to hold ``key``."""
        known = self._visible.get(member)
        return known is not None and fingerprint(key) in known.keys

    def longest(
        self, keys: Sequence[bytes], start: int, members: Collection[str]
    ) -> tuple[str | None, int]:
        """The one of ``members`` that holds most of ``keys`` from ``start`` on without a gap, and
        how many that are; (None, 0) if nobody holds the first.

        Among equals the first key decides: always the same owner, another one for other prefixes.
        """
        if start >= len(keys):
            return None, 0
        first = fingerprint(keys[start])
        owners = [
            (_rank(first, known.seed), name, known.keys)
            for name, known in self._visible.items()
            if name in members and first in known.keys
        ]
        owner, longest = None, 0
        for _, name, held in sorted(owners, key=lambda ranked: ranked[:2]):
            end = start + longest
            if end == len(keys):
                break
            # To have more than the best so far takes the first key that the best one lacks.
            if longest and fingerprint(keys[end]) not in held:
                continue
            run = _run(held, keys, start)
            if run > longest:
                owner, longest = name, run
        return owner, longest


def _run(held: FingerprintSet, keys: Sequence[bytes], start: int) -> int:
    """How many of ``keys`` from ``start`` on ``held`` has without a gap."""
    for begin in range(start, len(keys), _LOOKUP_KEYS):
        values = fingerprints(keys[begin : begin + _LOOKUP_KEYS])
        run = held.run(values)
        if run < len(values):
            return begin - start + run
    return len(keys) - start


def _seed(member: str) -> int:
    return int.from_bytes(blake2b(member.encode(), digest_size=8).digest(), "big")


def _rank(first: int, seed: int) -> int:
    """A member's place among the owners of a prefix: a rendezvous hash."""
    return (first ^ seed) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
