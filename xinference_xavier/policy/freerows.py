"""A tier's free rows: taken in ascending runs, without ever being listed as a whole.

Covers: which rows may be given away. Does not cover what the others hold (``tier``). Runs on vLLM's
scheduler thread; every call takes time for the rows that it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from xinference_xavier.types import IntegrityError

#: State of a free row, in the column of states.
FREE = 0


class FreeRows:
    """Free rows below ``rows``.

    Those below a frontier are in a list; from the frontier on a row is free where its state says
    so. So neither a clear nor growth has to make a list.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._listed: list[int] = []
        self._frontier = 0
        #: Free rows from the frontier on.
        self._fresh = rows
        #: Rows listed before the tier shrank; some may be beyond it now.
        self._unsifted: list[int] = []

    def __len__(self) -> int:
        return len(self._listed) + self._fresh

    @property
    def sifted(self) -> bool:
        """Whether all that is free is known."""
        return not self._unsifted

    def take(self, count: int, state: Sequence[int]) -> list[int]:
        """``count`` rows, ascending, so that neighbours make one run of bytes; at most ``len``."""
        split = max(0, len(self._listed) - count)
        taken = self._listed[split:]
        del self._listed[split:]
        if len(taken) < count:
            taken += self._take_fresh(count - len(taken), state)
        taken.sort()
        return taken

    def _take_fresh(self, count: int, state: Sequence[int]) -> list[int]:
        first = self._frontier
        if self._fresh == self.rows - first:  # no row that was cleared is still in use
            taken = list(range(first, first + count))
        else:
            free = (row for row in range(first, self.rows) if state[row] == FREE)
            taken = list(islice(free, count))
        self._frontier = taken[-1] + 1
        self._fresh -= count
        return taken

    def give_back(self, row: int) -> None:
        """``row`` is free; one beyond ``rows`` is nobody's any more."""
        if row < self._frontier:
            self._listed.append(row)
        elif row < self.rows:
            self._fresh += 1

    def give_back_all(self, rows: Sequence[int]) -> None:
        """``give_back`` for many."""
        if rows and max(rows) < self._frontier:
            self._listed.extend(rows)
            return
        for row in rows:
            self.give_back(row)

    def reset(self, held: int) -> None:
        """All rows are free but ``held`` of them."""
        self._listed, self._unsifted, self._frontier = [], [], 0
        self._fresh = self.rows - held

    def grow(self, rows: int) -> None:
        self._fresh += rows - self.rows
        self.rows = rows

    def shrink(self, rows: int, state: bytearray) -> None:
        self.rows = rows
        self._unsifted, self._listed = self._listed, []
        self._frontier = min(self._frontier, rows)
        self._fresh = state.count(FREE, self._frontier, rows)

    def sift(self, count: int) -> None:
        """Look through up to ``count`` of the rows that were listed before ``shrink``."""
        batch = self._unsifted[-count:]
        del self._unsifted[-count:]
        self._listed += [row for row in batch if row < self.rows]

    def validate(self, name: str, free: Sequence[int]) -> None:
        """Raise ``IntegrityError`` unless this is ``free``, all rows whose state says so."""
        listed = sorted(row for row in (*self._listed, *self._unsifted) if row < self.rows)
        below = [row for row in free if row < self._frontier]
        fresh = sum(1 for row in free if self._frontier <= row < self.rows)
        if listed != below or self._fresh != fresh:
            raise IntegrityError(f"{name}: the free rows and the states differ")
        if any(row >= self.rows for row in self._listed):
            raise IntegrityError(f"{name}: a row beyond the tier may be taken")
