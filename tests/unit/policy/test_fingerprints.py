"""Fingerprint sets are sets, stay small, and never hold up or upset a reader on another thread."""

from __future__ import annotations

import random
import struct
import sys
import threading
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.policy import fingerprints as module
from xinference_xavier.policy.fingerprints import (
    FingerprintSet,
    fingerprint,
    fingerprints,
    pack,
    unpack,
)

HASH = bytes(range(32))

#: Few slots of the smallest table, so that probes collide, wrap around and shift back.
crowded = st.builds(lambda home, turn: home + turn * 7, st.integers(1, 9), st.integers(0, 5))


def numbers(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) | 1 for _ in range(count)]


def table_bytes(held: FingerprintSet) -> int:
    return sum(map(sys.getsizeof, held._tables))


def test_groups_of_one_hash_differ():
    values = fingerprints(HASH + group.to_bytes(4, "big") for group in range(1000))
    assert len(set(values)) == 1000
    assert fingerprint(HASH + bytes(4)) == values[0]
    assert fingerprint(HASH + (999).to_bytes(4, "big")) == values[999]


def test_is_eight_bytes_and_never_zero():
    key = bytes(36)
    assert fingerprint(key) == fingerprints([key])[0] == 1
    assert fingerprint(b"\xff" * 36) < 2**64
    assert len({fingerprint(bytes([byte]) + HASH[1:] + bytes(4)) for byte in range(256)}) == 256


def test_a_key_of_another_length_is_refused():
    with pytest.raises(struct.error):
        fingerprint(HASH)


@given(st.lists(st.integers(1, 2**64 - 1)))
def test_packing_keeps_order_and_values(values):
    packed = pack(values)
    assert len(packed) == 8 * len(values)
    assert list(unpack(packed)) == values


def test_a_broken_packet_is_refused():
    with pytest.raises(ValueError, match="multiple of item size"):
        unpack(pack([1, 2])[:-1])


@given(st.lists(st.tuples(st.booleans(), crowded), max_size=60), st.integers(1, 40))
def test_is_a_set_with_a_limit(steps, limit):
    held, model, refused = FingerprintSet(limit), set[int](), 0
    for adds, value in steps:
        if not adds:
            assert held.discard(value) == (value in model)
            model.discard(value)
        elif value in model or len(model) < limit:
            assert held.add(value)
            model.add(value)
        else:
            assert not held.add(value)
            refused += 1
        assert len(held) == len(model)
    assert {value for value in range(1, 50) if value in held} == model & set(range(1, 50))
    assert sorted(unpack(held.packed())) == sorted(model)
    assert held.refused == refused
    held.clear()
    assert len(held) == 0
    assert held.packed() == b""
    assert not any(value in held for value in model)


@pytest.mark.parametrize("expected", [0, 30_000])
def test_keeps_every_entry_over_many_shards_and_turnovers(expected):
    held = FingerprintSet(30_000, expected)
    values = numbers(60_000)
    for position, value in enumerate(values):
        if position >= 30_000:
            assert held.discard(values[position - 30_000])
        assert held.add(value)
    assert len(held) == 30_000
    assert held.run(values[30_000:]) == 30_000
    assert not any(value in held for value in values[:30_000])
    assert set(unpack(held.packed())) == set(values[30_000:])


def test_run_ends_at_the_first_gap():
    held = FingerprintSet(100)
    for value in (1, 2, 4):
        held.add(value)
    assert held.run([1, 2, 3, 4]) == 2
    assert held.run([4, 2, 1]) == 3
    assert held.run([3]) == held.run([]) == 0


def test_an_entry_takes_at_most_20_bytes():
    held, limit = FingerprintSet(50_000), 50_000
    for count, value in enumerate(numbers(limit), 1):
        held.add(value)
        if count % 1000 == 0 and count >= 10_000:
            assert table_bytes(held) / count <= 20
    loaded = FingerprintSet(limit, expected=limit)
    for value in numbers(limit):
        loaded.add(value)
    assert table_bytes(loaded) / limit <= 20


def test_a_load_in_the_order_of_another_set_does_not_crowd_it():
    """A set lists its entries by slot: filling another one in that order must not make clusters."""
    held = FingerprintSet(20_000)
    for value in numbers(20_000):
        held.add(value)
    copy = FingerprintSet(20_000)
    longest = 0
    for value in unpack(held.packed()):
        copy.add(value)
        table = copy._tables[(value >> module._SHARD_SHIFT) % len(copy._tables)]
        slot = module._find(table, value)
        longest = max(longest, (slot - value % len(table)) % len(table))
    assert longest < 100


def test_no_table_is_large():
    """What is copied in one go stays small, however large the set is."""
    held = FingerprintSet(200_000)
    for value in numbers(200_000):
        held.add(value)
    assert max(map(len, held._tables)) < 4 * module._ENTRIES_PER_SHARD


def test_a_reader_of_a_table_without_a_gap_comes_back():
    held = FingerprintSet(10)
    held._tables[0] = array("Q", [7 * turn for turn in range(1, 8)])
    assert 7 * 100 not in held
    assert 7 * 7 in held
    assert held.run([7, 14, 8]) == 2


@pytest.mark.usefixtures("eager_switches")
def test_a_reader_on_another_thread_is_never_upset():
    """Growth, shifts, clears: the reader gets an answer each time, and a right one afterwards."""
    held = FingerprintSet(5_000)
    values = numbers(6_000)
    stop, reads, errors = threading.Event(), [0], list[BaseException]()

    def read() -> None:
        try:
            while not stop.is_set():
                for begin in range(0, 6_000, 100):
                    assert 0 <= held.run(values[begin : begin + 100]) <= 100
                    reads[0] += 1
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    draw = random.Random(2)
    for _ in range(4):
        held.clear()
        for value in values:
            held.add(value)
        for value in draw.sample(values, 3_000):
            held.discard(value)
    stop.set()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert errors == []
    assert reads[0] > 0
    left = set(unpack(held.packed()))
    assert {value for value in values if value in held} == left
    assert len(left) == len(held)
