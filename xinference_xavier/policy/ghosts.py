"""What was evicted and came back: how much of it a larger tier would have kept.

Covers: fingerprints of evicted snapshots in fixed memory, and how far apart eviction and return
were. Does not cover what is evicted (``planner``, ``moves``). Runs on vLLM's scheduler thread;
other threads read the counters.

Under LRU a snapshot that was computed again ``n`` evictions after its own would have stayed in a
tier with ``n`` more rows, so the number of evictions between is the room that was missing. Of a
large tier only every ``2**k``-th key, by its hash, is followed and counts that many times.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

#: Places for fingerprints, 8 bytes each, and how many keys are to be followed at most.
SLOT_BITS, MOST_FOLLOWED = 13, 2048
#: Room that was missing, in percent of the tier's rows: upper bounds of the counters.
PERCENTS = (25, 50, 100, 200, 400)
_PLACE, _WORD = 2**SLOT_BITS - 1, 2**32 - 1


class Ghosts:
    """A table with one place per fingerprint; a newer one displaces what had its place.

    So a few ghosts are lost, and the counts are rather too low than too high.

    Args:
        rows: rows of both tiers together.
    """

    def __init__(self, rows: int) -> None:
        reach = rows * (1 + PERCENTS[-1] // 100)
        #: One key in so many is followed: a power of two.
        self.weight = 1 << max(0, (reach - 1) // MOST_FOLLOWED).bit_length()
        self._chosen = self.weight - 1 << SLOT_BITS
        #: By the lower bits of a hash: its upper bits, and the eviction's number, 0 for none.
        self._prints = array("I", bytes(4 << SLOT_BITS))
        self._numbers = array("I", bytes(4 << SLOT_BITS))
        #: Snapshots evicted so far.
        self.evicted = 0
        #: Of them, those computed again, by ``PERCENTS``; the last place counts all beyond.
        self.returned = [0] * (len(PERCENTS) + 1)

    def evict(self, keys: Sequence[bytes]) -> None:
        """``keys`` were dropped to make room, in this order."""
        chosen, before = self._chosen, self.evicted + 1
        for position, hashed in enumerate(map(hash, keys)):
            if not hashed & chosen:
                self._prints[hashed & _PLACE] = hashed >> 32 & _WORD
                self._numbers[hashed & _PLACE] = before + position & _WORD
        self.evicted += len(keys)

    def admit(self, keys: Iterable[bytes], rows: int) -> None:
        """``keys`` were computed, maybe again; ``rows`` are those of the tier that evicts."""
        chosen = self._chosen
        for hashed in map(hash, keys):
            if hashed & chosen:
                continue
            number = self._numbers[hashed & _PLACE]
            if number and self._prints[hashed & _PLACE] == hashed >> 32 & _WORD:
                self._numbers[hashed & _PLACE] = 0
                missing = 100 * ((self.evicted - number & _WORD) + 1)
                self.returned[bisect_left(PERCENTS, missing / max(1, rows))] += self.weight

    def clear(self) -> None:
        """Forget the fingerprints; the counts stay."""
        self._numbers = array("I", bytes(4 << SLOT_BITS))

    def as_dict(self) -> dict[str, int]:
        """Counts for the API, ``returned_<percent>`` by the room that was missing."""
        names = [f"returned_{percent}" for percent in PERCENTS] + ["returned_beyond"]
        return {"evicted": self.evicted, **dict(zip(names, self.returned, strict=True))}
