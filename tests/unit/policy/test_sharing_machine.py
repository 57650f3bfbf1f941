"""State machine over publishers, a tracker and mirrors: messages are lost, repeated and overtaken,
and the tracker forgets everything. Whatever happened, what heartbeats reveal mends it."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy_sharing import keys

from xinference_xavier.policy.directory import Batch, Directory, Publisher
from xinference_xavier.policy.fingerprints import fingerprint, unpack
from xinference_xavier.policy.mirror import Mirror

MEMBERS = ("p", "q")
KEYS = keys(*range(10))
FINGERPRINTS = {fingerprint(key): key for key in KEYS}

members = st.sampled_from(MEMBERS)
mirrors = st.sampled_from((0, 1))
picks = st.integers(0, 63)
#: Whether the network delivers the same message once more later.
repeats = st.sampled_from([False, False, True])
#: Whether an answer arrives.
answers = st.sampled_from([True, True, False])


class Replica:
    """One publisher, the keys it really has, and every state that it has published."""

    def __init__(self, member: str) -> None:
        self.publisher = Publisher(member, batch_keys=3, pending_changes=12)
        self.there: dict[bytes, None] = {}
        self.published: dict[int, frozenset[bytes]] = {}

    def restart(self) -> None:
        self.publisher.restart(lambda: tuple(self.there))

    def take(self) -> Batch | None:
        batch = self.publisher.take()
        if batch is None:
            return None
        before = frozenset() if batch.start else self.published[batch.number - 1]
        removed = {FINGERPRINTS[value] for value in unpack(batch.removed)}
        added = {FINGERPRINTS[value] for value in unpack(batch.added)}
        assert not removed & added
        self.published[batch.number] = before - removed | added
        return batch


class SharingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replicas = {member: Replica(member) for member in MEMBERS}
        self.directory = Directory(member_keys=100)
        self.mirrors = [Mirror(member_keys=100, slice_keys=2) for _ in range(2)]
        self.to_tracker: list[Batch] = []
        self.to_mirror: list[tuple[int, Batch]] = []
        self.snapshots: list[tuple[int, str, int, bytes]] = []
        self.loads: list[Iterator[None]] = []

    # -- replicas ----------------------------------------------------------------------------

    @rule(member=members, number=st.integers(0, 9), present=st.booleans())
    def change(self, member, number, present):
        replica = self.replicas[member]
        if present:
            replica.there[KEYS[number]] = None
        else:
            replica.there.pop(KEYS[number], None)
        replica.publisher.note(KEYS[number], present)

    @rule(member=members, numbers=st.lists(st.integers(0, 9), min_size=4, max_size=10))
    def change_many(self, member, numbers):
        for number in numbers:
            self.change(member, number, KEYS[number] not in self.replicas[member].there)

    @rule(member=members)
    def clear(self, member):
        self.replicas[member].there.clear()
        self.replicas[member].publisher.clear()

    @rule(member=members)
    def publish(self, member):
        replica = self.replicas[member]
        if replica.publisher.needs_restart:
            replica.restart()
        batch = replica.take()
        if batch is not None:
            self.to_tracker.append(batch)

    # -- network -----------------------------------------------------------------------------

    @precondition(lambda self: self.to_tracker)
    @rule(pick=picks, repeat=repeats, answered=answers)
    def reach_tracker(self, pick, repeat, answered):
        batch = self.pick(self.to_tracker, pick, repeat)
        if self.directory.publish("n", batch):
            self.to_mirror += [(mirror, batch) for mirror in range(2)]
        elif answered:
            self.replicas[batch.member].restart()

    @precondition(lambda self: self.to_mirror)
    @rule(pick=picks, repeat=repeats, answered=answers)
    def reach_mirror(self, pick, repeat, answered):
        mirror, batch = self.pick(self.to_mirror, pick, repeat)
        if not self.mirrors[mirror].apply(batch) and answered:
            self.ask(mirror, batch.member)

    @precondition(lambda self: self.to_tracker or self.to_mirror or self.snapshots)
    @rule(pick=picks)
    def lose(self, pick):
        queues = [queue for queue in (self.to_tracker, self.to_mirror, self.snapshots) if queue]
        self.pick(queues[pick % len(queues)], pick // len(queues), repeat=False)

    @staticmethod
    def pick(queue, pick, repeat):
        position = pick % len(queue)
        return queue[position] if repeat else queue.pop(position)

    # -- snapshots ---------------------------------------------------------------------------

    @rule(mirror=mirrors, member=members)
    def ask(self, mirror, member):
        snapshot = self.directory.snapshot("n", member)
        if snapshot is not None:
            self.snapshots.append((mirror, member, *snapshot))

    @precondition(lambda self: self.snapshots)
    @rule(pick=picks, repeat=repeats)
    def begin_load(self, pick, repeat):
        mirror, member, number, packed = self.pick(self.snapshots, pick, repeat)
        self.loads.append(self.mirrors[mirror].load(member, number, packed))
        next(self.loads[-1], None)

    @precondition(lambda self: self.loads)
    @rule(pick=picks)
    def load_slice(self, pick):
        next(self.pick(self.loads, pick, repeat=True), None)

    @precondition(lambda self: self.loads)
    @rule(pick=picks, close=st.booleans())
    def end_load(self, pick, close):
        loading = self.pick(self.loads, pick, repeat=False)
        if close:
            loading.close()
        else:
            list(loading)

    # -- accidents ---------------------------------------------------------------------------

    @rule()
    def restart_tracker(self):
        self.directory = Directory(member_keys=100)

    @rule(member=members)
    def forget(self, member):
        self.directory.forget(member)

    @rule(mirror=mirrors, member=members)
    def drop(self, mirror, member):
        self.mirrors[mirror].drop(member)

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def equal_numbers_mean_equal_contents(self):
        for member, number in self.directory.numbers(MEMBERS).items():
            assert self.told(member) == self.replicas[member].published[number]
        for mirror in self.mirrors:
            for member in mirror.members():
                number = mirror._mirrored[member].number
                assert self.seen(mirror, member) == self.replicas[member].published[number]

    def told(self, member):
        _, packed = self.directory.snapshot("n", member)
        return {FINGERPRINTS[value] for value in unpack(packed)}

    @staticmethod
    def seen(mirror, member):
        return {key for key in KEYS if mirror.holds(member, key)}

    @rule()
    def heal(self):
        """The links work again: one heartbeat of each side finds and mends what is wrong."""
        for loading in self.loads:
            list(loading)
        self.loads.clear()
        for replica in self.replicas.values():
            self.publish_all(replica)
            member, number = replica.publisher.member, replica.publisher.number
            if self.directory.numbers([member]) != {member: number}:
                replica.restart()
                self.publish_all(replica)
        for mirror in self.mirrors:
            for member in mirror.wanted(self.directory.numbers(MEMBERS)):
                list(mirror.load(member, *self.directory.snapshot("n", member)))
        self.check_equal()

    def publish_all(self, replica):
        while True:
            if replica.publisher.needs_restart:
                replica.restart()
            batch = replica.take()
            if batch is None:
                return
            if not self.directory.publish("n", batch):
                replica.restart()
                continue
            for mirror in self.mirrors:
                mirror.apply(batch)

    def check_equal(self):
        for member, replica in self.replicas.items():
            assert self.told(member) == set(replica.there)
            for mirror in self.mirrors:
                assert self.seen(mirror, member) == set(replica.there)

    def teardown(self):
        self.heal()
        # What was still under way arrives late, and changes nothing.
        for batch in self.to_tracker:
            assert self.directory.publish("n", batch)
        for mirror, batch in self.to_mirror:
            assert self.mirrors[mirror].apply(batch)
        for mirror, member, number, packed in self.snapshots:
            assert list(self.mirrors[mirror].load(member, number, packed)) == []
        self.check_equal()


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=settings().max_examples // 2)
