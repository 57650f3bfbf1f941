"""The key map is a dictionary, takes bounded memory, and never copies much at once."""

from __future__ import annotations

import hashlib
import sys
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.keymap import KEYS_PER_SHARD, KeyMap
from xinference_xavier.policy.planner import Planner, default_low_water


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers())))
def test_key_map_is_a_dictionary(steps):
    mapped, model = KeyMap(3 * KEYS_PER_SHARD), dict[bytes, int]()
    assert len(mapped.shards) == 3
    for sets, number, location in steps:
        if sets:
            mapped[key(number)] = model[key(number)] = location
        else:
            assert mapped.pop(key(number)) == model.pop(key(number), None)
    assert sorted(mapped.items()) == sorted(model.items())
    assert sorted(mapped.keys()) == sorted(model)
    assert len(mapped) == len(model)
    for number in range(21):
        assert mapped.get(key(number)) == model.get(key(number))
        assert (key(number) in mapped) == (key(number) in model)
    mapped.clear()
    assert len(mapped) == 0


def test_shards_stay_small_when_keys_come_and_go():
    rows = 10 * KEYS_PER_SHARD
    mapped = KeyMap(rows)
    for number in range(rows * 4):
        mapped[key(number)] = number
        if number >= rows:
            mapped.pop(key(number - rows))
    largest = max(sys.getsizeof(shard) for shard in mapped.shards)
    assert largest <= 1.1 * sys.getsizeof(dict.fromkeys(range(2**13 // 3 * 2)))
    assert sum(map(sys.getsizeof, mapped.shards)) / rows < 75


def test_snapshot_takes_at_most_200_bytes():
    """Key, locations, rows and orders of both tiers, after four turnovers."""
    rows, batch = 20 * KEYS_PER_SHARD, 64
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        gpu_rows = rows // 5
        index = SnapshotIndex(gpu_rows, rows - gpu_rows)
        planner = Planner(index, default_low_water(gpu_rows, batch))
        for mark in range(rows * 4 // batch):
            keys = [key(number) for number in range(mark * batch, (mark + 1) * batch)]
            planner.commit_store(planner.admit(keys, mark, set()), ok=True)
            for plan in planner.plan_moves():
                planner.commit_move(plan, ok=True)
        del keys
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(index) > 0.98 * rows
    assert taken / len(index) <= 200
