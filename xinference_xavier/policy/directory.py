"""Which replica holds which snapshots: what each one publishes, and what the tracker keeps of it.

A replica (*member*) publishes changes of its readable keys as numbered batches (``Publisher``).
The tracker keeps their sum per member (``Directory``) and forwards them; every other replica keeps
a copy (``mirror``). Messages may be lost, repeated or overtake each other. Numbers of a member
only grow, also when it starts over, so equal numbers mean equal contents, and a gap is seen.

Does not cover the calls, nor when to try again (``actors``). Threads are named at each class.
Contents are fingerprints: a wrong entry costs a failed fetch, which is a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xinference_xavier.policy.fingerprints import FingerprintSet, fingerprint, pack, unpack

#: Most keys of a batch.
BATCH_KEYS = 512
#: Fingerprints kept of one member, 12 to 18 bytes each.
MEMBER_KEYS = 1_000_000
#: Changes kept for publishing; beyond them starting over costs less.
PENDING_CHANGES = 400_000


class Batch(NamedTuple):
    """Changes of one member's readable keys. Plain data; a key is in one of both at most."""

    member: str
    #: One more than that of the member's batch before.
    number: int
    #: What the member published before is void.
    start: bool
    #: Fingerprints as ``pack`` has them.
    added: bytes
    removed: bytes


class Publisher:
    """What one replica has to tell. The first batch is a start, empty if need be: it announces
    the member.

    ``note`` and ``clear`` belong to the scheduler thread, all else to the bridge thread.
    """

    def __init__(
        self, member: str, batch_keys: int = BATCH_KEYS, pending_changes: int = PENDING_CHANGES
    ) -> None:
        self.member = member
        #: Too many changes were pending and are lost: nothing is published until ``restart``.
        self.needs_restart = False
        #: Number of the last batch taken; -1 before the first.
        self.number = -1
        self._batch_keys = batch_keys
        self._pending_changes = pending_changes
        #: Changes in their order; None stands for ``clear``.
        self._log: deque[tuple[bytes, bool] | None] = deque()
        self._start = True
        self._there: Iterator[bytes] = iter(())

    def note(self, key: bytes, present: bool) -> None:
        """``key`` has become readable, or is no longer. Call it after the index has changed."""
        if len(self._log) >= self._pending_changes:
            self.needs_restart = True
            self._log.clear()
        self._log.append((key, present))

    def clear(self) -> None:
        """No key is readable any more."""
        self._log.clear()
        self._log.append(None)

    def restart(self, readable: Callable[[], Iterable[bytes]]) -> None:
        """Start over with the keys that ``readable`` returns, then the changes that are pending.

        ``readable`` is called here, after the flag is down: changes lost later raise it again.
        It may be behind the log or ahead of it, since the last change of every key is pending.
        """
        self.needs_restart = False
        self._there = iter(readable())
        self._start = True

    def take(self) -> Batch | None:
        """The next batch, if there is anything to tell. Deliver it, or ``restart``."""
        if self.needs_restart:
            return None
        changes = self._next_changes()
        if not changes and not self._start:
            return None
        self.number += 1
        start, self._start = self._start, False
        added = pack(value for value, present in changes.items() if present)
        removed = pack(value for value, present in changes.items() if not present)
        return Batch(self.member, self.number, start, added, removed)

    def _next_changes(self) -> dict[int, bool]:
        """The last of up to a batch's changes, for each fingerprint."""
        changes: dict[int, bool] = {}
        for _ in range(self._batch_keys):
            key = next(self._there, None)
            if key is not None:
                changes[fingerprint(key)] = True
                continue
            try:
                change = self._log.popleft()
            except IndexError:
                break
            if change is None:
                changes.clear()
                self._start = True
            else:
                changes[fingerprint(change[0])] = change[1]
        return changes


def apply_batch(held: FingerprintSet, batch: Batch) -> None:
    """Apply changes. Raises ``ValueError`` for fingerprints that are not whole."""
    for value in unpack(batch.removed):
        held.discard(value)
    for value in unpack(batch.added):
        held.add(value)


@dataclass(slots=True)
class _Published:
    namespace: str
    number: int
    keys: FingerprintSet


class Directory:
    """What every member has published, by namespace. A member is in one namespace at a time.

    For the tracker's event loop only.
    """

    def __init__(self, member_keys: int = MEMBER_KEYS) -> None:
        """``member_keys``: most fingerprints kept of one member; the rest is not shared."""
        self._member_keys = member_keys
        self._members: dict[str, _Published] = {}

    def publish(self, namespace: str, batch: Batch) -> bool:
        """Take in one batch; one that is known already changes nothing.

        False: an earlier one is missing, so the member has to start over. Raises ``ValueError``
        for fingerprints that are not whole.
        """
        known = self._members.get(batch.member)
        if known is not None and batch.number <= known.number:
            return True
        if batch.start:
            known = _Published(namespace, batch.number - 1, FingerprintSet(self._member_keys))
            self._members[batch.member] = known
        if known is None or (namespace, batch.number) != (known.namespace, known.number + 1):
            return False
        apply_batch(known.keys, batch)
        known.number = batch.number
        return True

    def forget(self, member: str) -> None:
        """The member is gone."""
        self._members.pop(member, None)

    def members(self, namespace: str | None = None) -> set[str]:
        """Members of a namespace, or of all."""
        return {
            member
            for member, known in self._members.items()
            if namespace is None or known.namespace == namespace
        }

    def numbers(self, members: Iterable[str]) -> dict[str, int]:
        """Number of the last batch of each of ``members`` that is known.

        A replica finds in it whether its own last batches arrived, and what its mirror missed.
        """
        known = self._members
        return {member: known[member].number for member in members if member in known}

    def snapshot(self, namespace: str, member: str) -> tuple[int, bytes] | None:
        """Number of the member's last batch, and everything it has published until then."""
        known = self._members.get(member)
        if known is None or known.namespace != namespace:
            return None
        return known.number, known.keys.packed()
