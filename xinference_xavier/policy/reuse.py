"""The eviction order ``reuse``: what was used more often stays longer, and a scan leaves first.

Covers the order of one tier's rows. Does not cover counting uses (``tier``, ``history``). Runs on
vLLM's scheduler thread.

Rows lie in one LRU list for each class of use counts: 1, 2 to 3, 4 to 7, 8 and more. The victim is
the oldest row of one of these lists, the one whose age, divided by 4 for each class above
the first, is greatest. So one-time prompts pass through a cache without pushing out what many
prompts share, a row that falls out of use leaves all the same, and where little is used more than
once the order is LRU. Rows that a peer also holds (``COPY``) go before all others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from xinference_xavier.policy.history import COPY, MOST_USES
from xinference_xavier.policy.order import NO_ROW

#: Binary logarithm of how many times longer a row of the next class stays.
_LONGER = 2
_CLASSES = MOST_USES.bit_length()
_COPIES = _CLASSES
#: Positions of the lists' ends; row ``r`` has position ``r + _ENDS``.
_ENDS = _CLASSES + 1
_WRAP = 2**32 - 1


def _class_of(uses: int) -> int:
    if uses & COPY:
        return _COPIES
    return min(max(1, uses).bit_length(), _CLASSES) - 1


_CLASS_OF = bytes(_class_of(uses) for uses in range(256))


class ReuseOrder:
    """One tier's order. 12 bytes a row, none of them visited by the cyclic garbage collector.

    Every method takes constant time; a search looks at the oldest row of each class.
    """

    #: Asks the index to count uses, and to give the column with ``attach``.
    counts_uses = True

    def __init__(self, rows: int) -> None:
        ends = array("i", range(_ENDS))
        self._next = ends + array("i", [NO_ROW]) * rows
        self._prev = array("i", self._next)
        #: When the row came to its place, in rows that came since the start, modulo 2**32.
        self._since = array("I", [0]) * rows
        self._now = 0
        self._uses = bytearray(rows)
        self._len = 0

    def attach(self, uses: bytearray) -> None:
        """Read use counts from this column, one byte a row, which the tier keeps."""
        self._uses = uses

    def add(self, row: int, key: bytes) -> None:
        self._now = (self._now + 1) & _WRAP
        self._append(row)

    def _append(self, row: int) -> None:
        nxt, prev = self._next, self._prev
        end, at = _CLASS_OF[self._uses[row]], row + _ENDS
        last = prev[end]
        nxt[last] = at
        prev[at] = last
        nxt[at] = end
        prev[end] = at
        self._since[row] = self._now
        self._len += 1

    def discard(self, row: int) -> None:
        nxt, prev, at = self._next, self._prev, row + _ENDS
        after, before = nxt[at], prev[at]
        nxt[before] = after
        prev[after] = before
        nxt[at] = prev[at] = NO_ROW
        self._len -= 1

    def touch(self, row: int) -> None:
        """As in the protocol. Lets no time pass: what a request touches changes no order but its
        own."""
        self.discard(row)
        self._append(row)

    def victim(self) -> int:
        return self._oldest(self._next[:_ENDS])

    def _oldest(self, heads: array[int]) -> int:
        """The row to go first among the lists' heads, given as positions."""
        if heads[_COPIES] != _COPIES:
            return heads[_COPIES] - _ENDS
        return self._oldest_of_classes(heads)

    def victim_but_copies(self) -> int:
        """The next row to evict that is no copy, or ``NO_ROW``."""
        return self._oldest_of_classes(self._next[:_ENDS])

    def _oldest_of_classes(self, heads: array[int]) -> int:
        since, now, best, most, shift = self._since, self._now, NO_ROW, -1, 0
        for at in heads[:_COPIES]:
            if at >= _ENDS:
                age = (now - since[at - _ENDS] & _WRAP) >> shift
                if age > most:
                    best, most = at - _ENDS, age
            shift += _LONGER
        return best

    def resize(self, rows: int) -> None:
        """Have ``rows`` rows from now on; those that go are not in the order."""
        more = rows - len(self._since)
        if more > 0:
            self._next.extend(array("i", [NO_ROW]) * more)
            self._prev.extend(array("i", [NO_ROW]) * more)
            self._since.extend(array("I", [0]) * more)
        del self._next[rows + _ENDS :], self._prev[rows + _ENDS :], self._since[rows:]

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        heads = self._next[:_ENDS]
        while (row := self._oldest(heads)) != NO_ROW:
            yield row
            after = self._next[row + _ENDS]
            heads[heads.index(row + _ENDS)] = after
