"""Eviction orders: which evictable row of a tier goes next.

Covers the protocol and LRU. Does not cover what is evictable (the index decides that) or what
happens to a victim (the planner decides that). Runs on vLLM's scheduler thread.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from xinference_xavier.types import OptionError

NO_ROW = -1


class EvictionOrder(Protocol):
    """Order of one tier's evictable rows. Every method takes constant time.

    A row is in the order exactly while it is READY and unpinned. An order may also have
    ``resize(rows)``, for a budget that changes while the replica runs: rows from ``rows`` on are
    not in it then. Without it another one is made, and every row is added to that. To save calls
    of one row each, it may have ``add_all(rows, keys)``, and both of ``victims(count)``, up to so
    many rows from the next victim on, left in the order, and ``drop_victims(rows)``, which takes
    out the first of those.

    An order with ``counts_uses`` true has uses counted, and ``attach(uses)``: it is given the
    column of use counts that its tier keeps, one byte a row, read when a row is added or touched.
    It may have ``victim_but_copies()``: the next victim without the bit ``history.COPY``.
    """

    def add(self, row: int, key: bytes) -> None:
        """``row`` became evictable; it was used just now."""

    def discard(self, row: int) -> None:
        """``row`` is no longer evictable: pinned, moving or gone."""

    def touch(self, row: int) -> None:
        """``row``, which is in the order, was used just now."""

    def victim(self) -> int:
        """The next row to evict, left in the order, or ``NO_ROW``."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """Rows from the next victim to the last; for ``validate`` only."""


class LRUOrder:
    """Least recently used first: a doubly linked list threaded through two integer columns.

    Eight bytes a row and nothing for the cyclic garbage collector to visit, against about 160
    bytes an entry of an OrderedDict. Position ``rows`` is the sentinel.
    """

    def __init__(self, rows: int) -> None:
        self._end = rows
        self._next = array("i", [NO_ROW]) * (rows + 1)
        self._prev = array("i", [NO_ROW]) * (rows + 1)
        self._next[rows] = self._prev[rows] = rows
        self._len = 0

    def add(self, row: int, key: bytes) -> None:
        end, nxt, prev = self._end, self._next, self._prev
        last = prev[end]
        nxt[last] = row
        prev[row] = last
        nxt[row] = end
        prev[end] = row
        self._len += 1

    def discard(self, row: int) -> None:
        nxt, prev = self._next, self._prev
        after, before = nxt[row], prev[row]
        nxt[before] = after
        prev[after] = before
        self._len -= 1

    def add_all(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        """``add`` for many, in this order."""
        end, nxt, prev = self._end, self._next, self._prev
        last = prev[end]
        for row in rows:
            nxt[last] = row
            prev[row] = last
            last = row
        nxt[last] = end
        prev[end] = last
        self._len += len(rows)

    def victims(self, count: int) -> list[int]:
        """Up to ``count`` rows from the next victim on, left in the order."""
        nxt, row, rows = self._next, self._end, []
        for _ in range(min(count, self._len)):
            row = nxt[row]
            rows.append(row)
        return rows

    def drop_victims(self, rows: Sequence[int]) -> None:
        """Take out ``rows``, which are the first of ``victims``."""
        if rows:
            first = self._next[rows[-1]]
            self._next[self._end] = first
            self._prev[first] = self._end
            self._len -= len(rows)

    def touch(self, row: int) -> None:
        self.discard(row)
        self.add(row, b"")

    def victim(self) -> int:
        row = self._next[self._end]
        return row if row != self._end else NO_ROW

    def resize(self, rows: int) -> None:
        """Have ``rows`` rows from now on; those that go are not in the order."""
        old, nxt, prev = self._end, self._next, self._prev
        first, last = nxt[old], prev[old]
        more = array("i", [NO_ROW]) * max(0, rows - old)
        nxt.extend(more)
        prev.extend(more)
        nxt[old] = prev[old] = NO_ROW
        nxt[rows], prev[rows] = (rows, rows) if first == old else (first, last)
        if first != old:
            nxt[last] = prev[first] = rows
        del nxt[rows + 1 :], prev[rows + 1 :]
        self._end = rows

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        row = self._next[self._end]
        while row != self._end:
            yield row
            row = self._next[row]


def add_all(order: EvictionOrder, rows: Sequence[int], keys: Sequence[bytes]) -> None:
    """``order.add`` for many, in this order."""
    many = getattr(order, "add_all", None)
    if many is not None:
        many(rows, keys)
        return
    for row, key in zip(rows, keys, strict=True):
        order.add(row, key)


OrderFactory = Callable[[int], EvictionOrder]

#: Orders of our own, by the name that the option has for them.
_BUILT_IN = {
    "lru": f"{__name__}:LRUOrder",
    "reuse": "xinference_xavier.policy.reuse:ReuseOrder",
}

_METHODS = ("add", "discard", "touch", "victim", "__len__", "__iter__")


def order_factory(policy: str) -> OrderFactory:
    """Resolve the option ``xavier_policy``: a built-in name or ``module:Class``.

    The class is called with the tier's number of rows.

    Raises:
        OptionError: the name is unknown, cannot be imported, or names no ``EvictionOrder``.
    """
    known = ", ".join(sorted(_BUILT_IN))
    remedy = f"use one of {known}, or module:Class of an installed module"
    module_name, _, class_name = _BUILT_IN.get(policy, policy).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # the module is not ours: importing it may raise anything
        raise OptionError(
            f"xavier_policy={policy!r} cannot be imported ({error!r}); {remedy}"
        ) from error
    missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if not isinstance(found, type) or missing:
        lacks = f"lacks {', '.join(missing)}" if missing else "is not a class"
        raise OptionError(f"xavier_policy={policy!r} is no eviction order: it {lacks}; {remedy}")
    factory: OrderFactory = found
    return factory
