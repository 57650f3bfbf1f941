"""One tier's rows: what may happen to each, the free list and the eviction order.

Covers bookkeeping of single rows. Does not cover the columns themselves (``columns``), where a key
lies (``index``) or what moves where (``planner``). Runs on vLLM's scheduler thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence

from xinference_xavier.policy.columns import (
    FREE,
    LEAVING,
    READY,
    STRETCH,
    WRITING,
    ZOMBIE,
    RowColumns,
    RowState,
)
from xinference_xavier.policy.history import COPY, MOST_USES
from xinference_xavier.policy.order import NO_ROW, add_all

_NO_PINS = bytes(STRETCH * array("I").itemsize)


class TierRows(RowColumns):
    """Rows ``0 .. rows - 1`` of one tier.

    Every job in flight that reads or writes a row holds one pin on it, so a row is never reused
    under a copy. A row is in the eviction order exactly while it is READY and unpinned.
    """

    def take(self, count: int) -> list[int]:
        """Take ``count`` free rows, ascending, so that neighbours make one run of bytes.

        The caller must ``reserve`` each. ``count`` must not exceed ``free``.
        """
        return self._free.take(count, self.state)

    def reserve(self, rows: Sequence[int], keys: Sequence[bytes], state: int, mark: int) -> None:
        """Give taken rows to the job that will write them; the job holds the first pin."""
        many = len(rows)
        first = rows[0] if many else 0
        if many > 4 and rows == list(range(first, first + many)):  # neighbours: columns at once
            run = slice(first, first + many)
            self.key[run] = keys
            self.mark[run] = array("Q", [mark]) * many
            self.pins[run] = array("I", [1]) * many
            self.state[run] = bytes([state]) * many
        else:
            for row, key in zip(rows, keys, strict=True):
                self.key[row] = key
                self.mark[row] = mark
                self.pins[row] = 1
                self.state[row] = state
        self.counts[FREE] -= many
        self.counts[state] += many

    def publish(self, row: int) -> None:
        """The writing job succeeded: the row is a snapshot, used just now.

        The row is WRITING or ARRIVING, which nobody but its job can pin.
        """
        self.counts[self.state[row]] -= 1
        self.counts[READY] += 1
        self.state[row] = READY
        self.pins[row] = 0
        self.order.add(row, self.key[row])

    def publish_all(self, rows: Sequence[int]) -> None:
        """``publish`` for WRITING rows, in the order of their use."""
        state, pins, column = self.state, self.pins, self.key
        for row in rows:
            state[row] = READY
            pins[row] = 0
        add_all(self.order, rows, [column[row] for row in rows])
        self.counts[WRITING] -= len(rows)
        self.counts[READY] += len(rows)

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
        self.count_use(row, mark)
        if self.state[row] == READY and not self.pins[row]:
            self.order.touch(row)

    def drop(self, row: int) -> None:
        """Free an evictable row."""
        self.order.discard(row)
        self.drop_taken((row,))

    def victim_but_copies(self) -> int:
        """The next victim, where the order can tell one that is no copy."""
        choice = getattr(self.order, "victim_but_copies", self.order.victim)
        row: int = choice()
        return row

    def take_victims(
        self, count: int, mark: int, own: Collection[bytes], victim: Callable[[], int]
    ) -> tuple[list[int], int | None]:
        """Take up to ``count`` victims out of the order, each looked at once, to be evicted.

        Where there are fewer, also what came next: a row that stays, because request ``mark`` used
        it or its key is among ``own``, or ``NO_ROW``. ``victim`` names the next one where the order
        does not give many at once.
        """
        order, marks, column = self.order, self.mark, self.key
        look = getattr(order, "victims", None)
        if look is not None:
            rows = look(count)
            last = NO_ROW if len(rows) < count else None
            if mark in [marks[row] for row in rows] or (
                own and any(column[row] in own for row in rows)
            ):
                end = next(i for i, r in enumerate(rows) if marks[r] == mark or column[r] in own)
                rows, last = rows[:end], rows[end]
            order.drop_victims(rows)  # type: ignore[attr-defined]
            return rows, last
        rows = []
        for _ in range(count):
            row = victim()
            if row == NO_ROW or marks[row] == mark or (own and column[row] in own):
                return rows, row
            order.discard(row)
            rows.append(row)
        return rows, None

    def drop_taken(self, rows: Sequence[int]) -> list[bytes]:
        """Free READY rows that were taken from the order; returns their keys."""
        state, column = self.state, self.key
        keys = [column[row] for row in rows]
        for row in rows:
            state[row] = FREE
            column[row] = b""
        self.counts[READY] -= len(rows)
        self.counts[FREE] += len(rows)
        self._free.give_back_all(rows)
        return keys

    def remove(self, row: int) -> None:
        """Its key is gone: free the row now, or once the jobs that hold it have ended."""
        if self.pins[row]:
            self._set_state(row, ZOMBIE)
        else:
            self.drop(row)

    def clear(self) -> list[bytes]:
        """Remove every key at once: what jobs hold is a ZOMBIE, all else is free.

        Takes time for the rows in use, and little for the others. Returns the keys there were,
        whose deallocation takes its time.
        """
        held, rows = self._held(), len(self.state)
        keys, self.key = self.key, [b""] * rows
        self.state = bytearray(rows)
        for row in held:
            self.state[row] = ZOMBIE
            self.key[row] = keys[row]
        self.counts = [0] * len(RowState)
        self.counts[FREE], self.counts[ZOMBIE] = rows - len(held), len(held)
        self.order = self._make_order(rows)
        self._free.reset(sum(1 for row in held if row < self.rows))
        return keys

    def _held(self) -> list[int]:
        """Pinned rows. Jobs take neighbours, so most stretches of the column are all zero."""
        held = []
        for start in range(0, len(self.pins), STRETCH):
            part = self.pins[start : start + STRETCH]
            if part.tobytes() != _NO_PINS[: len(part) * part.itemsize]:
                held += [row for row, pins in enumerate(part, start) if pins]
        return held

    def count_use(self, row: int, mark: int) -> None:
        """Request ``mark`` uses the row; a request's later uses are not counted."""
        if mark > self.mark[row]:
            self.mark[row] = mark
            if self.history is not None:
                self.count(row)

    def count(self, row: int) -> None:
        """Count a use of the row in the history, which there must be."""
        uses = self.uses[row]
        if uses & MOST_USES < MOST_USES:
            self.uses[row] = uses + 1
        if self.history is not None and self.history.follows(self.key[row]):
            self.history.use(self.key[row])

    def is_copy(self, row: int) -> bool:
        """Whether a peer held the row's key when it was read from there."""
        return self.uses[row] & COPY != 0

    def keep(self, row: int) -> None:
        """An evictable copy is the last one: its turn comes when its uses say."""
        self.uses[row] &= ~COPY
        self.order.touch(row)
