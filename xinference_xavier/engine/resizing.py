"""Changing a tier's size over all ranks: who must have done what before the next may go on.

Covers: both sides of the orders, and how far a change is. Does not cover rows
(``policy/resize.py``), memory (``storage/slab.py``), or whether a budget is allowed
(``steering.py``). ``RankResizes`` runs on the worker's main thread, ``Resizes`` on the scheduler
thread; neither waits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xinference_xavier.engine.messages import ResizeOrder, XavierWorkerMetadata
from xinference_xavier.policy.resize import Resizer
from xinference_xavier.storage.hostmem import Populator
from xinference_xavier.storage.slab import Slab
from xinference_xavier.types import Tier

logger = logging.getLogger(__name__)


class RankResizes:
    """One rank's slabs under orders."""

    def __init__(self, slabs: Sequence[Slab | None]) -> None:
        """``slabs`` by tier."""
        self._slabs = slabs
        self._running: dict[int, Populator | None] = {}

    def begin(self, orders: Collection[ResizeOrder]) -> None:
        """Carry out orders in the background."""
        for order in orders:
            slab = self._slabs[order.tier]
            self._running[order.order_id] = None if slab is None else slab.resize(order.rows)

    def take_ended(self) -> tuple[dict[int, int], dict[int, str]]:
        """Orders that have ended since the last call, and why some of them failed."""
        if not self._running:
            return {}, {}
        ended, problems = {}, {}
        for order_id, task in list(self._running.items()):
            if task is None or task.ended:
                del self._running[order_id]
                ended[order_id] = 1
                if task is not None and task.problem is not None:
                    problems[order_id] = task.problem
        return ended, problems


@dataclass(slots=True)
class Change:
    """A tier on its way from ``old_rows`` to ``rows``."""

    tier: Tier
    rows: int
    old_rows: int
    budget_bytes: int
    #: The order that the ranks carry out now, or None while rows are still in use.
    order_id: int | None = None
    pending_ranks: int = 0
    problem: str | None = None
    #: It failed, and the ranks give back what they have taken.
    undoing: bool = False

    @property
    def state(self) -> str:
        return "draining" if self.order_id is None else "ranks"


class Resizes:
    """Changes under way, at most one for each tier."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._next_id = 1
        self._orders: list[ResizeOrder] = []
        self.changes: dict[Tier, Change] = {}
        #: Why the last change of a tier did not come about.
        self.problems: dict[Tier, str] = {}

    def begin(self, resizer: Resizer, tier: Tier, rows: int, budget_bytes: int) -> None:
        """Begin to change a tier that is not being changed."""
        old = resizer.rows_of(tier).rows
        self.problems.pop(tier, None)
        if rows == old:
            return
        change = self.changes[tier] = Change(tier, rows, old, budget_bytes)
        if rows > old:  # memory first, rows then
            self._order(change, rows)
        else:
            resizer.set_rows(tier, rows)

    def advance(self, resizer: Resizer) -> list[ResizeOrder]:
        """One step; orders for all ranks."""
        for change in self.changes.values():
            drained = change.tier not in resizer.shrinking
            if change.order_id is None and drained:
                self._order(change, change.rows)
        orders, self._orders = self._orders, []
        return orders

    def _order(self, change: Change, rows: int) -> None:
        order = ResizeOrder(self._next_id, change.tier, rows)
        self._next_id += 1
        change.order_id, change.pending_ranks = order.order_id, self._ranks
        self._orders.append(order)

    def acknowledge(self, resizer: Resizer, report: XavierWorkerMetadata) -> list[Change]:
        """What ranks report; the changes that are over by it, failed ones with a ``problem``."""
        over = []
        for change in list(self.changes.values()):
            ranks = report.resized.get(change.order_id or 0, 0)
            if not ranks:
                continue
            change.problem = change.problem or report.resize_problems.get(change.order_id or 0)
            change.pending_ranks -= ranks
            if change.pending_ranks > 0:
                continue
            if change.problem is not None and not change.undoing:
                change.undoing = True
                self._order(change, change.old_rows)
                continue
            del self.changes[change.tier]
            if change.undoing:
                self.problems[change.tier] = str(change.problem)
                logger.warning("xavier: the %s tier cannot grow: %s", *_names(change))
            elif change.rows > change.old_rows:
                resizer.set_rows(change.tier, change.rows)
            over.append(change)
        return over


def _names(change: Change) -> tuple[str, str]:
    return change.tier.name, str(change.problem)
