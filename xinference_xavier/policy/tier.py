"""One tier's rows as columns: state, pins, last user, key, the free list and the eviction order.

Covers bookkeeping of single rows. Does not cover where a key lies (``index``) or what moves where
(``planner``). Runs on vLLM's scheduler thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum

from xinference_xavier.policy.order import EvictionOrder, OrderFactory
from xinference_xavier.types import IntegrityError


class RowState(IntEnum):
    """What a row holds. ``docs/architecture.md`` has the table of what may happen in each."""

    FREE = 0
    #: Being stored; readable once every rank has written it.
    WRITING = 1
    #: An immutable snapshot; a victim when nobody pins it.
    READY = 2
    #: Source of a demotion or promotion: still read, never a victim.
    LEAVING = 3
    #: Target of a demotion or promotion: reserved, read by nobody.
    ARRIVING = 4
    #: Its key is gone, but a job still reads or writes the row.
    ZOMBIE = 5
    #: Being read from a peer; loads of it wait for the bytes and hold pins beside the fetch's own.
    FETCHING = 6


#: The states as plain integers: an enum member costs its lookup on every block.
FREE, WRITING, READY, LEAVING, ARRIVING, ZOMBIE, FETCHING = map(int, RowState)


class TierRows:
    """Rows ``0 .. rows - 1`` of one tier.

    Every job in flight that reads or writes a row holds one pin on it, so a row is never reused
    under a copy. A row is in the eviction order exactly while it is READY and unpinned. The
    columns take 33 bytes a row, the key itself not counted, and nothing in them is visited by the
    cyclic garbage collector but the list of keys.
    """

    def __init__(self, rows: int, order: OrderFactory) -> None:
        self.rows = rows
        self.state = bytearray(rows)
        self.pins = array("I", [0]) * rows
        #: Sequence number of the request that used the row last.
        self.mark = array("Q", [0]) * rows
        self.key: list[bytes] = [b""] * rows
        self._new_order = order
        self.order: EvictionOrder = order(rows)
        self.counts = [0] * len(RowState)
        self.counts[FREE] = rows
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        """Rows that hold nothing."""
        return len(self._free)

    @property
    def snapshots(self) -> int:
        """Rows a lookup can hit."""
        return self.counts[READY] + self.counts[LEAVING]

    def take(self, count: int) -> list[int]:
        """Take ``count`` free rows, ascending, so that neighbours make one run of bytes.

        The caller must ``reserve`` each. ``count`` must not exceed ``free``.
        """
        split = len(self._free) - count
        taken = self._free[split:]
        del self._free[split:]
        taken.sort()
        return taken

    def reserve(self, rows: Sequence[int], keys: Sequence[bytes], state: int, mark: int) -> None:
        """Give taken rows to the job that will write them; the job holds the first pin."""
        for row, key in zip(rows, keys, strict=True):
            self.key[row] = key
            self.mark[row] = mark
            self.pins[row] = 1
            self.state[row] = state
        self.counts[FREE] -= len(rows)
        self.counts[state] += len(rows)

    def publish(self, row: int) -> None:
        """The writing job succeeded: the row is a snapshot, used just now.

        The row is WRITING or ARRIVING, which nobody but its job can pin.
        """
        self.counts[self.state[row]] -= 1
        self.counts[READY] += 1
        self.state[row] = READY
        self.pins[row] = 0
        self.order.add(row, self.key[row])

    def arrived(self, row: int) -> None:
        """A row being fetched holds its bytes now; the fetch keeps its pin until ``unpin``."""
        self._set_state(row, READY)

    def abandon(self, row: int) -> None:
        """The job that holds the row's last pin is over and nothing is kept."""
        self.pins[row] = 0
        self._set_state(row, FREE)

    def leave(self, row: int) -> None:
        """A READY, unpinned row becomes the source of a move; the move holds a pin."""
        self.pin(row)
        self._set_state(row, LEAVING)

    def stay(self, row: int) -> None:
        """The move was given up: a source that still has its key is a snapshot again, used just
        now; the move's pin is dropped."""
        if self.state[row] == LEAVING:
            self._set_state(row, READY)
        self.unpin(row)

    def pin(self, row: int) -> None:
        """Keep a readable row from being evicted or moved."""
        if not self.pins[row]:
            self.order.discard(row)
        self.pins[row] += 1

    def unpin(self, row: int) -> None:
        """Drop one pin; the last one counts as a use and makes the row evictable or free."""
        self.pins[row] -= 1
        if self.pins[row]:
            return
        if self.state[row] == READY:
            self.order.add(row, self.key[row])
        elif self.state[row] == ZOMBIE:
            self._set_state(row, FREE)

    def touch(self, row: int, mark: int) -> None:
        """Count a use by request ``mark`` of a row that holds a key."""
        self.mark[row] = max(self.mark[row], mark)
        if self.state[row] == READY and not self.pins[row]:
            self.order.touch(row)

    def drop(self, row: int) -> None:
        """Free an evictable row."""
        self.order.discard(row)
        self.counts[READY] -= 1
        self.counts[FREE] += 1
        self.state[row] = FREE
        self.key[row] = b""
        self._free.append(row)

    def remove(self, row: int) -> None:
        """Its key is gone: free the row now, or once the jobs that hold it have ended."""
        if self.pins[row]:
            self._set_state(row, ZOMBIE)
        else:
            self.drop(row)

    def clear(self) -> None:
        """Remove every key at once: what jobs hold is a ZOMBIE, all else is free."""
        held = [row for row, pins in enumerate(self.pins) if pins]
        keys, self.key = self.key, [b""] * self.rows
        self.state = bytearray(self.rows)
        for row in held:
            self.state[row] = ZOMBIE
            self.key[row] = keys[row]
        self.counts = [self.state.count(state) for state in RowState]
        self.order = self._new_order(self.rows)
        self._free = [row for row in range(self.rows - 1, -1, -1) if not self.pins[row]]

    def _set_state(self, row: int, state: int) -> None:
        self.counts[self.state[row]] -= 1
        self.counts[state] += 1
        self.state[row] = state
        if state == FREE:
            self.key[row] = b""
            self._free.append(row)

    def rows_in(self, *states: int) -> Iterator[int]:
        """Rows in any of ``states``, ascending. Walks the tier: for ``validate``."""
        return (row for row in range(self.rows) if self.state[row] in states)

    def validate(self, name: str) -> None:
        """Raise ``IntegrityError`` unless every invariant of the columns holds."""
        counts = [self.state.count(state) for state in RowState]
        check(counts == self.counts, f"{name}: counts are {self.counts}, states say {counts}")
        free = list(self.rows_in(FREE))
        check(sorted(self._free) == free, f"{name}: the free list and the states differ")
        evictable = [row for row in self.rows_in(READY) if not self.pins[row]]
        ordered = list(self.order)
        check(sorted(ordered) == evictable, f"{name}: the order is not the evictable rows")
        check(len(self.order) == len(ordered), f"{name}: the order miscounts")
        held = self.rows_in(WRITING, LEAVING, ARRIVING, ZOMBIE, FETCHING)
        check(all(self.pins[row] for row in held), f"{name}: a job's row without a pin")
        check(not any(self.pins[row] for row in free), f"{name}: a pin on a free row")


def check(holds: bool, message: str) -> None:
    """Raise ``IntegrityError`` with ``message`` unless ``holds``."""
    if not holds:
        raise IntegrityError(message)
