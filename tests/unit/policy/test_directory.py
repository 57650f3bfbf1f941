"""What a replica publishes, and what the tracker keeps of it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable

import pytest
from policy_sharing import change, key, keys, packed, start

from xinference_xavier.policy.directory import BATCH_KEYS, Batch, Directory, Publisher
from xinference_xavier.policy.fingerprints import fingerprint, fingerprints, unpack


def batches(publisher: Publisher) -> list[Batch]:
    return list(iter(publisher.take, None))


def contents(taken: Iterable[Batch]) -> set[int]:
    """What somebody who applies every batch ends up with."""
    held: set[int] = set()
    for batch in taken:
        if batch.start:
            held.clear()
        held.difference_update(unpack(batch.removed))
        held.update(unpack(batch.added))
    return held


def held(directory: Directory) -> set[int]:
    snapshot = directory.snapshot("n", "m")
    assert snapshot is not None
    return set(unpack(snapshot[1]))


class TestPublisher:
    def test_the_first_batch_announces_the_member(self):
        publisher = Publisher("m")
        assert publisher.number == -1
        assert batches(publisher) == [Batch("m", 0, True, b"", b"")]
        assert publisher.number == 0
        assert publisher.take() is None

    def test_the_last_state_of_a_key_wins_within_a_batch(self):
        publisher = Publisher("m")
        for number, present in [(1, True), (2, True), (1, False), (3, False), (3, True)]:
            publisher.note(key(number), present)
        assert batches(publisher) == [Batch("m", 0, True, packed(2, 3), packed(1))]

    def test_order_is_kept_across_batches_of_bounded_size(self):
        publisher = Publisher("m")
        for number in range(BATCH_KEYS + 1):
            publisher.note(key(number), True)
        publisher.note(key(0), False)
        first, second = batches(publisher)
        assert first.added == packed(*range(BATCH_KEYS))
        assert second == Batch("m", 1, False, packed(BATCH_KEYS), packed(0))

    def test_a_clear_starts_over_and_drops_what_was_pending(self):
        publisher = Publisher("m")
        batches(publisher)
        publisher.note(key(1), True)
        publisher.clear()
        publisher.note(key(2), True)
        assert batches(publisher) == [Batch("m", 1, True, packed(2), b"")]
        publisher.clear()
        assert batches(publisher) == [Batch("m", 2, True, b"", b"")]

    def test_a_clear_during_a_restart_leaves_only_what_came_after(self):
        publisher = Publisher("m", batch_keys=2)
        publisher.restart(lambda: keys(1, 2, 3))
        publisher.take()
        publisher.clear()
        publisher.note(key(4), True)
        taken = batches(publisher)
        assert contents(taken) == set(fingerprints(keys(4)))
        assert taken[-1].number == publisher.number == 2

    def test_a_restart_tells_what_is_there_and_then_what_is_pending(self):
        publisher = Publisher("m", batch_keys=2)
        for number in (1, 2, 3):
            publisher.note(key(number), True)
        before = batches(publisher)
        publisher.note(key(1), False)  # already missing from what is there
        publisher.note(key(4), True)  # already there
        publisher.note(key(3), False)  # not yet missing
        publisher.restart(lambda: keys(2, 3, 4))
        taken = batches(publisher)
        assert [batch.start for batch in taken] == [True, False, False]
        assert [batch.number for batch in taken] == [len(before) + n for n in range(3)]
        assert contents(taken) == set(fingerprints(keys(2, 4)))

    def test_too_many_changes_ask_for_a_restart_and_publish_nothing_before(self):
        publisher = Publisher("m", pending_changes=4)
        batches(publisher)
        for number in range(4):
            publisher.note(key(number), True)
        assert not publisher.needs_restart
        publisher.note(key(4), True)
        publisher.note(key(0), False)
        assert publisher.needs_restart
        assert publisher.take() is None
        publisher.restart(lambda: keys(0, 1, 2, 3, 4))
        assert not publisher.needs_restart
        assert contents(batches(publisher)) == set(fingerprints(keys(1, 2, 3, 4)))

    def test_changes_lost_while_the_keys_are_read_ask_for_another_restart(self):
        publisher = Publisher("m", pending_changes=1)

        def readable() -> list[bytes]:
            for number in range(3):
                publisher.note(key(number), True)
            return []

        publisher.restart(readable)
        assert publisher.needs_restart
        assert publisher.take() is None

    def test_batches_are_plain_data(self):
        batch = Batch("m", 3, False, packed(1), packed(2))
        assert pickle.loads(pickle.dumps(batch)) == batch


class TestDirectory:
    def test_applies_batches_in_order(self):
        directory = Directory()
        assert directory.publish("n", start(0, 1, 2))
        assert directory.publish("n", change(1, added=(3,), removed=(1,)))
        assert directory.snapshot("n", "m") is not None
        assert held(directory) == set(fingerprints(keys(2, 3)))
        assert directory.numbers(["m", "unknown"]) == {"m": 1}

    def test_a_member_that_is_not_known_has_to_start(self):
        directory = Directory()
        assert not directory.publish("n", change(5, added=(1,)))
        assert directory.members() == set()
        assert directory.publish("n", start(6, 2))
        assert held(directory) == set(fingerprints(keys(2)))

    def test_a_gap_is_refused_until_the_member_starts_over(self):
        directory = Directory()
        directory.publish("n", start(0, 1))
        assert not directory.publish("n", change(2, added=(2,)))
        assert held(directory) == set(fingerprints(keys(1)))
        assert directory.publish("n", start(3, 4))
        assert held(directory) == set(fingerprints(keys(4)))

    def test_a_batch_that_is_known_changes_nothing(self):
        directory = Directory()
        first, second = start(0, 1), change(1, removed=(1,))
        for batch in (first, second, second, first):
            assert directory.publish("n", batch)
        assert held(directory) == set()
        assert directory.numbers(["m"]) == {"m": 1}

    def test_namespaces_do_not_see_each_other(self):
        directory = Directory()
        for namespace, member in [("n", "m"), ("n", "p"), ("other", "q")]:
            directory.publish(namespace, start(0, 1)._replace(member=member))
        assert directory.members() == {"m", "p", "q"}
        assert directory.members("n") == {"m", "p"}
        assert directory.snapshot("other", "m") is None
        assert directory.snapshot("n", "nobody") is None

    def test_a_member_moves_to_another_namespace_by_starting_there(self):
        directory = Directory()
        directory.publish("n", start(0, 1))
        assert not directory.publish("other", change(1, added=(2,)))
        assert directory.publish("other", start(2, 3))
        assert directory.members("n") == set()
        assert directory.snapshot("other", "m") == (2, packed(3))
        assert directory.publish("n", change(1, added=(2,)))  # late: known and ignored
        assert directory.members("n") == set()

    def test_forgets_a_member(self):
        directory = Directory()
        directory.publish("n", start(0, 1))
        directory.forget("m")
        directory.forget("m")
        assert directory.members() == set()
        assert not directory.publish("n", change(1))

    def test_keeps_a_bounded_number_of_keys_of_a_member(self):
        directory = Directory(member_keys=3)
        directory.publish("n", start(0, 1, 2, 3, 4, 5))
        assert held(directory) == set(fingerprints(keys(1, 2, 3)))
        assert directory.publish("n", change(1, added=(6,), removed=(2,)))
        assert held(directory) == set(fingerprints(keys(1, 3, 6)))

    def test_a_broken_batch_leaves_a_gap(self):
        directory = Directory()
        for batch in (start(0, 1), change(1, added=(2,))):
            with pytest.raises(ValueError, match="multiple of item size"):
                directory.publish("n", batch._replace(added=b"123"))
            assert not directory.publish("n", change(batch.number + 1, added=(3,)))
            assert directory.publish("n", batch)


@pytest.mark.usefixtures("eager_switches")
def test_notes_taken_while_the_scheduler_writes_lose_nothing():
    """Overflows, clears and restarts on both threads: what is published is what is there."""
    publisher = Publisher("m", batch_keys=16, pending_changes=300)
    there: dict[bytes, None] = {}
    writing = threading.Event()

    def write() -> None:
        for number in range(12_000):
            present = number % 3 != 2
            changed = key(number % 500)
            if number % 5_000 == 4_999:
                there.clear()
                publisher.clear()
            elif present:
                there[changed] = None
                publisher.note(changed, True)
            else:
                there.pop(changed, None)
                publisher.note(changed, False)
        writing.set()

    writer = threading.Thread(target=write)
    writer.start()
    directory, restarts = Directory(), 0
    while True:
        finished = writing.is_set()
        if publisher.needs_restart:
            restarts += 1
            publisher.restart(lambda: tuple(there))
        batch = publisher.take()
        if batch is not None:
            assert directory.publish("n", batch)
        elif finished and not publisher.needs_restart:
            break
    writer.join(timeout=30)
    assert not writer.is_alive()
    assert held(directory) == {fingerprint(changed) for changed in there}
    assert len(there) > 100
    assert restarts > 0
