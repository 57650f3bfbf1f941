"""A map from key to location that grows without a pause.

One dictionary of a million keys copies itself every two million changes, which takes 58 ms of the
scheduler thread, and takes 60 to 120 bytes an entry once keys come and go. Many small ones, each
filled to just under a third of a power of two, copy themselves in well under 1 ms and take about
65. Changed on vLLM's scheduler thread only; other threads may read.
"""

from __future__ import annotations

from collections.abc import Sequence

#: CPython grows a dictionary that has seen enough deletions to three times its length, rounded up
#: to a power of two: 2**12 here, with six per cent to spare for uneven shards.
KEYS_PER_SHARD = 2**12 // 3 * 94 // 100


class KeyMap:
    """Key to location.

    ``shards[hash(key) % len(shards)]`` is the dictionary of ``key``; loops over keys use it
    directly, because a call would cost more than the access.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: most keys that it will hold."""
        # Odd, so that a shard's keys do not share low bits of their hashes.
        count = -(-capacity // KEYS_PER_SHARD) | 1
        self.shards: list[dict[bytes, int]] = [{} for _ in range(count)]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __contains__(self, key: object) -> bool:
        return key in self.shards[hash(key) % len(self.shards)]

    def get(self, key: bytes) -> int | None:
        return self.shards[hash(key) % len(self.shards)].get(key)

    def __setitem__(self, key: bytes, location: int) -> None:
        self.shards[hash(key) % len(self.shards)][key] = location

    def pop(self, key: bytes) -> int | None:
        """Remove ``key``; where it was, or None."""
        return self.shards[hash(key) % len(self.shards)].pop(key, None)

    def update(self, keys: Sequence[bytes], locations: Sequence[int]) -> None:
        """Set many."""
        shards, count = self.shards, len(self.shards)
        for key, location in zip(keys, locations, strict=True):
            shards[hash(key) % count][key] = location

    def keys(self) -> tuple[bytes, ...]:
        """A copy of all keys; other threads may call it."""
        return tuple(key for shard in self.shards for key in tuple(shard))

    def items(self) -> list[tuple[bytes, int]]:
        """A copy of all entries."""
        return [item for shard in self.shards for item in shard.items()]

    def clear(self) -> list[dict[bytes, int]]:
        """Forget everything; returns what was there, whose deallocation takes its time."""
        shards, self.shards = self.shards, [{} for _ in self.shards]
        return shards
