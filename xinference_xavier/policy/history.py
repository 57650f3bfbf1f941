"""How often keys were used, also of those that are not here any more, in fixed memory.

Covers: use counts of a sample of keys, and what they say of the others. Does not cover the counts
of rows in use (``tier``) or who goes (``reuse``). Runs on vLLM's scheduler thread.

A prompt's blocks are used together, so a few of them tell of all: of a large cache every
``2**k``-th key, by its hash, is followed. A followed key has a place in one of many small sets, 16
bits with its fingerprint and its count. A set that is full forgets the key with the fewest uses,
of several the one longest there; when all have been used again, all of them count one less, so
that what was popular once does not stay for ever.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

#: Most uses that are told apart.
MOST_USES = 15
#: Bit of a row's use count: it was read from a peer, which may still hold it.
COPY = 0x80
#: Places of a set.
WAYS = 8
#: Places of the smallest table, 2 bytes each.
LEAST_PLACES = 2**15
#: Places for each row's share of the past: keys followed are so many times the rows, at least.
REACH = 16
_COUNT_SHIFT = 12
_ONCE, _PRINT = 1 << _COUNT_SHIFT, (1 << _COUNT_SHIFT) - 1


class UseHistory:
    """Counts of followed keys.

    Args:
        rows: rows of all tiers together.
    """

    def __init__(self, rows: int) -> None:
        places = max(LEAST_PLACES, 1 << max(0, rows - 1).bit_length())
        weight = 1 << max(0, -(-REACH * rows // places) - 1).bit_length()
        self._sets = places // WAYS - 1
        #: A key is followed when these bits of its hash are zero.
        self._chosen = (weight - 1) << 44
        self._places = array("H", [0]) * places

    def follows(self, key: bytes) -> bool:
        """Whether the key is one of the sample."""
        return not hash(key) & self._chosen

    def use(self, key: bytes) -> int:
        """Count a use of a key that is followed; how many it has had."""
        hashed = hash(key)
        start = (hashed & self._sets) * WAYS
        places = self._places[start : start + WAYS]
        mark = hashed >> 31 & _PRINT
        for position, place in enumerate(places):
            if place & _PRINT == mark and place >= _ONCE:
                uses = min((place >> _COUNT_SHIFT) + 1, MOST_USES)
                self._places[start + position] = uses << _COUNT_SHIFT | mark
                return uses
        counts = [place >> _COUNT_SHIFT for place in places]
        fewest = min(counts)
        if fewest > 1:
            places = array("H", [place - _ONCE for place in places])
        del places[counts.index(fewest)]
        places.append(_ONCE | mark)
        self._places[start : start + WAYS] = places
        return 1

    def admit(self, keys: Sequence[bytes]) -> list[int]:
        """Count a use of each of ``keys``, new blocks of one request in order; their counts.

        A block has been used at least as often as those after it: the next one that is followed
        tells. What follows the last of those counts as new.
        """
        counts: list[int] = []
        chosen = self._chosen
        for position, key in enumerate(keys):
            if not hash(key) & chosen:
                counts += [self.use(key)] * (position + 1 - len(counts))
        return counts + [1] * (len(keys) - len(counts))

    def clear(self) -> None:
        """Forget every count."""
        self._places = array("H", [0]) * len(self._places)
