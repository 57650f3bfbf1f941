"""Eight-byte fingerprints of keys, and sets of them in flat arrays.

Covers: what replicas tell each other about their snapshots. Does not cover who tells whom
(``directory``). Two keys may share a fingerprint: whoever acts on one checks the full key. One
thread changes a set; others may read it without a lock, and may be answered wrongly while a change
is under way, but never wait for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import Struct

#: Bytes of a packed fingerprint.
FINGERPRINT_BYTES = 8

#: First eight bytes of the hash, and the KV group: all of a key that a fingerprint needs.
_unpack_key = Struct(">Q24xI").unpack
#: Odd, so that the products of two groups with it differ.
_GROUP_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

#: A table grows in one go. This many entries take about a millisecond, which is what a thread that
#: waits for the interpreter notices of it.
_ENTRIES_PER_SHARD = 2048
_SMALLEST_TABLE = 7
#: Tables are filled to two thirds, and grow by half: 12 to 18 bytes an entry.
_LOAD_NUMERATOR, _LOAD_DENOMINATOR = 2, 3
#: A shard is chosen by the bits from here on, a slot by the remainder of all of them.
_SHARD_SHIFT = 44


def fingerprints(keys: Iterable[bytes]) -> list[int]:
    """The fingerprint of each key, 64 bits and never 0. Groups of one hash differ in theirs.

    Raises ``struct.error`` for a key that is not 32 bytes of hash and 4 bytes of KV group.
    """
    # A hash is as good as random, so its own bits will do.
    return [(head ^ group * _GROUP_FACTOR & _MASK) or 1 for head, group in map(_unpack_key, keys)]


def fingerprint(key: bytes) -> int:
    """The fingerprint of one key; see ``fingerprints``."""
    head, group = _unpack_key(key)
    return (head ^ group * _GROUP_FACTOR & _MASK) or 1


def pack(values: Iterable[int]) -> bytes:
    """Fingerprints as bytes in this machine's order, eight each."""
    return array("Q", values).tobytes()


def unpack(packed: bytes) -> array[int]:
    """The fingerprints of ``pack``. Raises ``ValueError`` unless there are eight bytes of each."""
    values = array("Q")
    values.frombytes(packed)
    return values


class FingerprintSet:
    """At most ``limit`` fingerprints.

    Open addressing with linear probing over many small tables, each one flat array without objects
    for the cyclic garbage collector. A larger table replaces its predecessor in one assignment. A
    reader's probe ends with the table it began with, whatever a writer does to it.
    """

    def __init__(self, limit: int, expected: int = 0) -> None:
        """``expected``: how many to make room for at once, so that filling need not grow."""
        self.limit = limit
        #: Additions refused since the set was made, because it was full.
        self.refused = 0
        # Odd, and not a power of two, so that it has no pattern in common with the slots.
        self._shard_count = -(-limit // _ENTRIES_PER_SHARD) | 1
        self._reset(min(expected, limit))

    def _reset(self, expected: int) -> None:
        # A tenth more than the mean: shards fill unevenly.
        entries = expected * 11 // 10 // self._shard_count
        size = max(entries * _LOAD_DENOMINATOR // _LOAD_NUMERATOR, _SMALLEST_TABLE) | 1
        self._counts = [0] * self._shard_count
        self._length = 0
        self._tables = [array("Q", bytes(FINGERPRINT_BYTES * size)) for _ in self._counts]

    def __len__(self) -> int:
        return self._length

    def __contains__(self, value: int) -> bool:
        return self.run((value,)) == 1

    def run(self, values: Iterable[int]) -> int:
        """How many of ``values``, from the first on, are here without a gap."""
        tables, found = self._tables, 0
        count = len(tables)
        for value in values:
            table = tables[(value >> _SHARD_SHIFT) % count]
            # Most are in their own slot: a call for each would double the time.
            if table[value % len(table)] != value and not _holds(table, value):
                return found
            found += 1
        return found

    def add(self, value: int) -> bool:
        """Insert ``value``; False, and counted, when the set is full. ``value`` is not 0."""
        shard = (value >> _SHARD_SHIFT) % self._shard_count
        table = self._tables[shard]
        slot = _find(table, value)
        if table[slot]:
            return True
        if self._length >= self.limit:
            self.refused += 1
            return False
        if self._counts[shard] * _LOAD_DENOMINATOR >= len(table) * _LOAD_NUMERATOR:
            table = self._tables[shard] = _grown(table)
            slot = _find(table, value)
        table[slot] = value
        self._counts[shard] += 1
        self._length += 1
        return True

    def discard(self, value: int) -> bool:
        """Remove ``value``; whether it was here."""
        shard = (value >> _SHARD_SHIFT) % self._shard_count
        table = self._tables[shard]
        slot = _find(table, value)
        if not table[slot]:
            return False
        _close_gap(table, slot)
        self._counts[shard] -= 1
        self._length -= 1
        return True

    def clear(self) -> None:
        """Remove everything, and give the memory back."""
        self._reset(0)

    def packed(self) -> bytes:
        """All fingerprints, in no order, as ``pack`` has them."""
        return b"".join(pack(filter(None, table)) for table in self._tables)


def _holds(table: array[int], value: int) -> bool:
    """Whether ``value`` is in ``table``, which a writer may be changing."""
    size = len(table)
    slot = value % size
    for _ in range(size):  # the free slot that would end the probe may be taken meanwhile
        entry = table[slot]
        if entry == value:
            return True
        if not entry:
            return False
        slot = slot + 1 if slot + 1 < size else 0
    return False


def _find(table: array[int], value: int) -> int:
    """The slot that holds ``value``, or the free one where it belongs. For the writer only:
    unless another one is at work, there is a free slot."""
    size = len(table)
    slot = value % size
    while table[slot] and table[slot] != value:
        slot = slot + 1 if slot + 1 < size else 0
    return slot


def _grown(table: array[int]) -> array[int]:
    """A copy of ``table`` with half as many slots again."""
    size = len(table) * 3 // 2 | 1
    larger = array("Q", bytes(FINGERPRINT_BYTES * size))
    for value in filter(None, table):
        slot = value % size
        while larger[slot]:
            slot = slot + 1 if slot + 1 < size else 0
        larger[slot] = value
    return larger


def _close_gap(table: array[int], gap: int) -> None:
    """Empty slot ``gap``, moving back what was probed past it: no tombstones are left."""
    size = len(table)
    slot = gap
    while True:
        slot = slot + 1 if slot + 1 < size else 0
        value = table[slot]
        if not value:
            break
        if (slot - value % size) % size >= (slot - gap) % size:
            table[gap] = value
            gap = slot
    table[gap] = 0
