"""Which prefix is asked of which peer: complete in every KV group, and no key looked up twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from xinference_xavier.engine.fetching import WINDOW_TRIES, Group, Wanted, choose


def key(group: int, block: int) -> bytes:
    return f"{group}/{block}".encode()


class Cluster:
    """What is here and what the one peer holds, by group and block."""

    def __init__(self, here: Collection[bytes], there: Collection[bytes]) -> None:
        self.here, self.there = set(here), set(there)
        self.looks: Counter[bytes] = Counter()

    def longest(self, keys: Sequence[bytes], start: int) -> tuple[str | None, int]:
        run = 0
        while start + run < len(keys) and keys[start + run] in self.there:
            run += 1
        return ("peer", run) if run else (None, 0)

    def holds(self, member: str, wanted: bytes) -> bool:
        assert member == "peer"
        self.looks[wanted] += 1
        return wanted in self.there

    def choose(self, groups: Sequence[Group], blocks: Sequence[int]) -> Wanted | None:
        keys = [[key(g, b) for b in range(count)] for g, count in enumerate(blocks)]
        primary = next(g for g, group in enumerate(groups) if group.window_blocks is None)
        return choose(groups, primary, keys, self.here.__contains__, self.longest, self.holds)


def all_of(group: int, *ranges: range) -> list[bytes]:
    return [key(group, block) for blocks in ranges for block in blocks]


FULL, HALF, WINDOW = Group(4, None), Group(2, None), Group(4, 2)


def test_what_is_missing_here_and_held_there() -> None:
    cluster = Cluster(all_of(0, range(2), range(3, 4)), all_of(0, range(6)))
    wanted = cluster.choose([FULL], [8])
    assert wanted == Wanted("peer", all_of(0, range(2, 3), range(4, 6)), 16)
    assert Cluster(all_of(0, range(8)), all_of(0, range(8))).choose([FULL], [8]) is None
    assert Cluster([], all_of(0, range(1, 8))).choose([FULL], [8]) is None


def test_every_full_group_has_to_be_complete() -> None:
    there = all_of(0, range(8)) + all_of(1, range(7))
    wanted = Cluster([], there).choose([FULL, HALF], [8, 16])
    assert wanted == Wanted("peer", all_of(0, range(3)) + all_of(1, range(6)), 12)


def test_a_window_is_complete_at_its_end_only() -> None:
    there = all_of(1, range(8)) + all_of(0, range(3, 5), range(7, 8))
    cluster = Cluster(all_of(0, range(1)), there)
    wanted = cluster.choose([WINDOW, FULL], [8, 8])
    assert wanted == Wanted("peer", all_of(0, range(3, 5)) + all_of(1, range(5)), 20)
    assert max(cluster.looks.values()) == 1


def test_the_search_is_bounded() -> None:
    blocks = 3 * WINDOW_TRIES
    cluster = Cluster([], all_of(0, range(blocks)))
    assert cluster.choose([FULL, WINDOW], [blocks, blocks]) is None
    assert len(cluster.looks) == WINDOW_TRIES + 1
    assert max(cluster.looks.values()) == 1
