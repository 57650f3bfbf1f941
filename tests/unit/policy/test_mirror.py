"""What a replica knows of the others: batches, snapshots, and who holds most of a prefix."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_sharing import change, key, keys, packed, start

from xinference_xavier.policy import mirror as module
from xinference_xavier.policy.directory import Batch
from xinference_xavier.policy.mirror import Mirror

ALL = ("m", "a", "b", "c")


def mirror_of(held: dict[str, Iterable[int]]) -> Mirror:
    mirror = Mirror(member_keys=1000)
    for member, numbers in held.items():
        assert mirror.apply(Batch(member, 0, True, packed(*numbers), b""))
    return mirror


def known(mirror: Mirror, member: str = "m") -> set[int]:
    return {number for number in range(10) if mirror.holds(member, key(number))}


def load(mirror: Mirror, number: int, *numbers: int) -> None:
    for _ in mirror.load("m", number, packed(*numbers)):
        pass


class TestBatches:
    def test_are_applied_in_order(self):
        mirror = mirror_of({"m": [1, 2]})
        assert mirror.apply(change(1, added=(3,), removed=(1,)))
        assert known(mirror) == {2, 3}
        assert mirror.members() == ("m",)

    def test_that_are_known_change_nothing(self):
        mirror = mirror_of({"m": [1]})
        assert mirror.apply(change(1, removed=(1,)))
        assert mirror.apply(start(0, 1))
        assert known(mirror) == set()

    def test_that_were_overtaken_are_put_in_their_place(self):
        mirror = mirror_of({"m": [1]})
        assert not mirror.apply(change(2, removed=(2,)))
        assert not mirror.apply(change(3, added=(3,)))
        assert known(mirror) == {1}
        assert mirror.apply(change(1, added=(2,)))
        assert known(mirror) == {1, 3}

    def test_of_a_new_start_void_what_came_before(self):
        mirror = mirror_of({"m": [1]})
        assert not mirror.apply(change(2, added=(2,)))
        assert not mirror.apply(change(5, added=(5,)))
        assert not mirror.apply(start(3, 3))
        assert known(mirror) == {3}
        assert mirror.apply(change(4, added=(4,)))
        assert known(mirror) == {3, 4, 5}

    def test_of_a_member_that_is_not_known_wait_for_a_snapshot(self):
        mirror = Mirror()
        assert not mirror.apply(change(4, added=(4,)))
        assert mirror.members() == ()
        load(mirror, 3, 1)
        assert known(mirror) == {1, 4}

    def test_that_are_broken_leave_a_gap(self):
        mirror = mirror_of({"m": [1]})
        with pytest.raises(ValueError, match="multiple of item size"):
            mirror.apply(change(1)._replace(added=b"123"))
        assert not mirror.apply(change(2, added=(2,)))
        load(mirror, 1, 1)
        assert known(mirror) == {1, 2}

    def test_that_wait_are_bounded(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(module, "HELD_BATCHES", 3)
        mirror = mirror_of({"m": [0]})
        for number in range(2, 8):
            assert not mirror.apply(change(number, added=(number,)))
        load(mirror, 4, 1)
        assert known(mirror) == {1, 5, 6, 7}


class TestSnapshots:
    def test_show_nothing_before_the_last_slice(self):
        mirror = Mirror(slice_keys=2)
        steps = 0
        for _ in mirror.load("m", 7, packed(1, 2, 3, 4, 5)):
            steps += 1
            assert mirror.members() == ()
            assert not mirror.holds("m", key(1))
        assert steps == 3
        assert known(mirror) == {1, 2, 3, 4, 5}

    def test_leave_the_old_contents_in_sight_until_then(self):
        mirror = Mirror(slice_keys=1)
        mirror.apply(start(0, 1))
        for _ in mirror.load("m", 7, packed(2, 3)):
            assert known(mirror) == {1}
        assert known(mirror) == {2, 3}

    def test_are_followed_by_the_batches_that_came_meanwhile(self):
        mirror = Mirror(slice_keys=1)
        loading = mirror.load("m", 7, packed(1, 2))
        next(loading)
        assert mirror.apply(change(9, removed=(3,)))
        assert mirror.apply(change(6, removed=(1,)))
        assert mirror.apply(change(8, added=(3, 4), removed=(2,)))
        assert mirror.wanted({"m": 7}) == []
        assert list(loading)
        assert known(mirror) == {1, 4}
        assert mirror.wanted({"m": 9}) == []

    def test_that_leave_a_gap_are_wanted_again(self):
        mirror = Mirror()
        assert not mirror.apply(change(9, added=(9,)))
        load(mirror, 7, 1)
        assert known(mirror) == {1}
        assert mirror.wanted({"m": 9}) == ["m"]
        assert not mirror.apply(change(10, added=(5,)))

    def test_give_way_to_a_newer_start(self):
        mirror = Mirror(slice_keys=1)
        loading = mirror.load("m", 7, packed(1, 2))
        next(loading)
        assert mirror.apply(start(6, 6))
        assert known(mirror) == set()
        assert mirror.apply(start(8, 8))
        assert known(mirror) == {8}
        assert list(loading) == []
        assert known(mirror) == {8}

    def test_that_are_older_than_what_is_known_change_nothing(self):
        mirror = Mirror(slice_keys=1)
        newer = mirror.load("m", 7, packed(7, 8))
        next(newer)
        assert list(mirror.load("m", 6, packed(6))) == []
        assert list(newer)
        load(mirror, 7, 5)
        assert known(mirror) == {7, 8}

    def test_give_way_to_a_newer_one(self):
        mirror = Mirror(slice_keys=1)
        older = mirror.load("m", 6, packed(6, 5))
        next(older)
        newer = mirror.load("m", 7, packed(7, 8))
        next(newer)
        assert list(older) == []
        assert list(newer)
        assert known(mirror) == {7, 8}

    def test_of_a_member_that_is_dropped_meanwhile_end(self):
        mirror = Mirror(slice_keys=1)
        loading = mirror.load("m", 7, packed(1, 2))
        next(loading)
        mirror.drop("m")
        assert not mirror.apply(change(8))
        assert list(loading) == []
        assert mirror.members() == ()

    def test_that_are_given_up_or_broken_can_be_loaded_again(self):
        mirror = Mirror(slice_keys=1)
        loading = mirror.load("m", 7, packed(1, 2))
        next(loading)
        loading.close()
        broken = mirror.load("m", 7, b"123")
        with pytest.raises(ValueError, match="multiple of item size"):
            next(broken)
        assert mirror.wanted({"m": 7}) == ["m"]
        load(mirror, 7, 1)
        assert known(mirror) == {1}

    def test_are_wanted_of_members_that_fell_behind_unnoticed(self):
        mirror = mirror_of({"m": [1], "a": [1]})
        assert mirror.wanted({"m": 1, "a": 0, "new": 0}) == ["m", "new"]

    def test_of_other_members_may_be_wanted_meanwhile(self):
        mirror = Mirror(slice_keys=1)
        loading = mirror.load("m", 7, packed(1))
        next(loading)
        assert mirror.wanted({"a": 0}) == ["a"]
        assert list(loading) == []
        assert known(mirror) == {1}


class TestKeys:
    def test_of_a_dropped_member_are_gone(self):
        mirror = mirror_of({"m": [1], "a": [1]})
        mirror.drop("m")
        mirror.drop("m")
        assert mirror.members() == ("a",)
        assert mirror.longest(keys(1), 0, ALL) == ("a", 1)
        assert mirror.wanted({"m": 0}) == ["m"]

    def test_that_turn_out_stale_are_taken_out(self):
        mirror = mirror_of({"m": [1, 2], "a": [1]})
        for member in ("m", "nobody"):
            mirror.forget_key(member, key(1))
        assert known(mirror) == {2}
        assert known(mirror, "a") == {1}
        assert mirror.apply(change(1, added=(1,)))
        assert known(mirror) == {1, 2}

    def test_beyond_the_bound_are_left_out(self):
        mirror = Mirror(member_keys=2)
        mirror.apply(start(0, 1, 2, 3))
        assert known(mirror) == {1, 2}


class TestLongest:
    def test_counts_from_the_start_to_the_first_gap(self):
        mirror = mirror_of({"a": [0, 1, 2, 4, 5], "b": [1, 2, 3, 5], "c": [4]})
        prefix = keys(*range(6))
        assert mirror.longest(prefix, 0, ALL) == ("a", 3)
        assert mirror.longest(prefix, 1, ALL) == ("b", 3)
        assert mirror.longest(prefix, 4, ALL) == ("a", 2)
        assert mirror.longest(prefix, 1, ["a", "c"]) == ("a", 2)
        assert mirror.longest(prefix, 3, ["a", "c"]) == (None, 0)
        assert mirror.longest(prefix, 6, ALL) == (None, 0)
        assert mirror.longest([], 0, ALL) == (None, 0)
        assert mirror.longest(prefix, 0, []) == (None, 0)

    @pytest.mark.parametrize("length", [63, 64, 65, 200])
    def test_is_right_around_the_size_of_a_slice(self, length: int):
        mirror = mirror_of({"a": range(length), "b": range(length - 1)})
        assert mirror.longest(keys(*range(300)), 0, ALL) == ("a", length)
        assert mirror.longest(keys(*range(length)), 0, ALL) == ("a", length)

    @given(st.dictionaries(st.sampled_from(ALL), st.sets(st.integers(0, 8))), st.integers(0, 9))
    def test_agrees_with_a_count_of_every_member(self, held, begin):
        mirror = mirror_of(held)
        runs = {}
        for member, numbers in held.items():
            end = begin
            while end < 9 and end in numbers:
                end += 1
            runs[member] = end - begin
        owner, longest = mirror.longest(keys(*range(9)), begin, ALL)
        assert longest == max(runs.values(), default=0)
        assert owner is None if not longest else runs[owner] == longest

    def test_takes_one_owner_for_a_prefix_and_spreads_prefixes(self):
        owners = Counter()
        for prefix in range(600):
            numbers = range(prefix * 3, prefix * 3 + 3)
            chosen = {
                mirror_of(dict.fromkeys(order, numbers)).longest(keys(*numbers), 0, ALL)
                for order in (("a", "b", "c"), ("c", "a", "b"))
            }
            assert len(chosen) == 1
            owners[chosen.pop()[0]] += 1
        assert set(owners) == {"a", "b", "c"}
        assert min(owners.values()) > 150

    def test_keeps_the_owner_of_a_prefix_when_others_go(self):
        numbers = range(5)
        owner, _ = mirror_of(dict.fromkeys("abc", numbers)).longest(keys(*numbers), 0, ALL)
        for other in set("abc") - {owner}:
            mirror = mirror_of(dict.fromkeys("abc", numbers))
            mirror.drop(other)
            assert mirror.longest(keys(*numbers), 0, ALL) == (owner, 5)


def test_a_lookup_ends_with_the_members_that_it_began_with():
    mirror = mirror_of({"a": range(3), "b": range(2)})

    class Joined(set[str]):
        """Somebody joins and somebody leaves while the lookup asks for each member."""

        def __contains__(self, name: object) -> bool:
            mirror.apply(Batch(f"joined after {name}", 0, True, packed(*range(4)), b""))
            mirror.drop("b")
            return True

    assert mirror.longest(keys(*range(4)), 0, Joined()) == ("a", 3)
    assert sorted(mirror.members()) == ["a", "joined after a", "joined after b"]


@pytest.mark.usefixtures("eager_switches")
def test_lookups_on_another_thread_are_never_upset():
    """Members come, go and change while the scheduler asks; those that stay are found."""
    mirror = mirror_of({"a": range(200)})
    prefix = keys(*range(200))
    stop, lookups, errors = threading.Event(), [0], list[BaseException]()

    def look() -> None:
        try:
            while not stop.is_set():
                assert mirror.longest(prefix, 0, mirror.members()) == ("a", 200)
                lookups[0] += 1
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    number = 0
    for turn in range(40):
        for member in ("b", "c"):
            mirror.apply(Batch(member, number, True, packed(*range(turn)), b""))
            mirror.apply(Batch(member, number + 1, False, packed(*range(100, 200)), packed(0)))
            for _ in mirror.load(member, number + 2, packed(*range(turn + 50))):
                pass
            mirror.forget_key(member, prefix[0])
        for guest in range(50):
            mirror.apply(Batch(f"guest {guest}", turn, True, b"", b""))
        for guest in range(50):
            mirror.drop(f"guest {guest}")
        mirror.drop("b")
        number += 3
    stop.set()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert errors == []
    assert lookups[0] > 0
