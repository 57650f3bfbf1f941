"""The columns of one tier's rows: state, pins, last user, uses, key, and how many rows there are.

Covers what the columns are, growing and shrinking them, and their invariants. Does not cover what
happens to single rows (``tier``). Runs on vLLM's scheduler thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum

from xinference_xavier.policy.freerows import FreeRows
from xinference_xavier.policy.history import UseHistory
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

#: Rows looked at in one go.
STRETCH = 1024


class RowColumns:
    """Rows ``0 .. rows - 1`` of one tier, one entry a row in each column.

    While a tier shrinks the columns are longer: rows from ``rows`` on are given to nobody any
    more, and go when all of them are free (``policy/resize.py``). The columns take 34 bytes a row,
    the key itself not counted, and nothing in them is visited by the cyclic garbage collector but
    the list of keys.
    """

    def __init__(self, rows: int, order: OrderFactory) -> None:
        self.rows = rows
        self.state = bytearray(rows)
        self.pins = array("I", [0]) * rows
        #: Sequence number of the request that used the row last.
        self.mark = array("Q", [0]) * rows
        self.key: list[bytes] = [b""] * rows
        #: How many requests have used the row's key, up to ``MOST_USES``, and ``COPY``: what an
        #: order with ``counts_uses`` goes by. All zero with any other.
        self.uses = bytearray(rows)
        #: Counts the uses of keys, also of those that leave; None with an order that asks for none.
        self.history: UseHistory | None = None
        self._new_order = order
        self.order: EvictionOrder = self._make_order(rows)
        self.counts = [0] * len(RowState)
        self.counts[FREE] = rows
        self._free = FreeRows(rows)
        #: Every row from here on is free, while the tier shrinks.
        self._top = rows
        self._look = 0

    @property
    def free(self) -> int:
        """Rows that hold nothing and may be taken."""
        return len(self._free)

    @property
    def snapshots(self) -> int:
        """Rows a lookup can hit."""
        return self.counts[READY] + self.counts[LEAVING]

    def _make_order(self, rows: int) -> EvictionOrder:
        order = self._new_order(rows)
        attach = getattr(order, "attach", None)
        if attach is not None:
            attach(self.uses)
        return order

    # -- changing the number of rows -----------------------------------------------------------

    def grow(self, rows: int) -> None:
        """Have ``rows`` rows, more than before. Not while the tier shrinks."""
        more = rows - self.rows
        self.state.extend(bytes(more))
        self.pins.extend(array("I", bytes(4 * more)))
        self.mark.extend(array("Q", bytes(8 * more)))
        self.uses.extend(bytes(more))
        self.key.extend([b""] * more)
        self._resize_order(rows)
        self.counts[FREE] += more
        self._free.grow(rows)
        self.rows = self._top = rows

    def shrink(self, rows: int) -> None:
        """Give rows from ``rows`` on to nobody any more. Not while the tier shrinks."""
        self.rows = rows
        self._free.shrink(rows, self.state)

    def drain(self, rows: int) -> bool:
        """A step towards the end of ``shrink`` that looks at up to ``rows`` rows; whether it is
        reached: the columns have ``self.rows`` rows then."""
        self._free.sift(rows)
        last = self.state[max(self.rows, self._top - rows) : self._top]
        self._top -= len(last) - len(last.rstrip(bytes([FREE])))
        if self._top > self.rows or not self._free.sifted:
            return False
        gone = len(self.state) - self.rows
        self._resize_order(self.rows)
        del self.state[self.rows :], self.pins[self.rows :], self.mark[self.rows :]
        del self.key[self.rows :], self.uses[self.rows :]
        self.counts[FREE] -= gone
        return True

    def leavable(self, count: int) -> list[int]:
        """Up to ``count`` snapshots that nobody pins among the rows that go, from where the last
        look ended down; looks at no more than ``STRETCH`` rows."""
        stop = self._look if self.rows < self._look <= self._top else self._top
        start = max(self.rows, stop - STRETCH)
        rows = [
            row
            for row in range(stop - 1, start - 1, -1)
            if self.state[row] == READY and not self.pins[row]
        ]
        self._look = start if len(rows) <= count else rows[count - 1]
        return rows[:count]

    @property
    def top(self) -> int:
        """Every row from here on is free."""
        return self._top

    @property
    def leaving(self) -> int:
        """Rows beyond the end of a tier that shrinks that are still in use."""
        return len(self.state) - self.rows - self.state.count(FREE, self.rows)

    @property
    def excess(self) -> int:
        """How many rows more than there will be hold something, while the tier shrinks."""
        return len(self.state) - self.counts[FREE] - self.rows

    def _resize_order(self, rows: int) -> None:
        resize = getattr(self.order, "resize", None)
        if resize is not None:
            resize(rows)
            return
        old, self.order = self.order, self._make_order(rows)
        for row in old:
            self.order.add(row, self.key[row])

    def _set_state(self, row: int, state: int) -> None:
        self.counts[self.state[row]] -= 1
        self.counts[state] += 1
        self.state[row] = state
        if state == FREE:
            self.key[row] = b""
            self._free.give_back(row)

    def rows_in(self, *states: int) -> Iterator[int]:
        """Rows in any of ``states``, ascending. Walks the tier: for ``validate``."""
        return (row for row, state in enumerate(self.state) if state in states)

    def validate(self, name: str) -> None:
        """Raise ``IntegrityError`` unless every invariant of the columns holds."""
        counts = [self.state.count(state) for state in RowState]
        check(counts == self.counts, f"{name}: counts are {self.counts}, states say {counts}")
        free = list(self.rows_in(FREE))
        self._free.validate(name, free)
        check(self._top <= len(self.state), f"{name}: the top is above the columns")
        above = set(range(self._top, len(self.state)))
        check(above <= set(free), f"{name}: a row above the top is in use")
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
