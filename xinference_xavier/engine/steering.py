"""What an operator may do to a running replica: clear, change budgets, pause stores, look up.

Covers: rules and answers, and getting commands to the scheduler thread. Does not cover who may ask
(``host``), rows (``policy``) or memory (``resizing``). Commands come on the bridge's event loop
and wait there. The scheduler thread runs them with its next step, before it plans; one that waits
for requests is woken (``compat.wake``). Lookups read, and run on the bridge's thread alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from xinference_xavier import budgets
from xinference_xavier.config import format_size, refusal
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.messages import ResizeOrder, XavierWorkerMetadata
from xinference_xavier.engine.resizing import Resizes
from xinference_xavier.engine.sizing import available_memory
from xinference_xavier.types import OptionError, Tier

logger = logging.getLogger(__name__)

#: How often an engine without requests is woken while a change of budgets is under way.
TEND_SECONDS = 0.05
#: A command that no step has run by then is not run at all.
COMMAND_SECONDS = 20.0

_OPTIONS = {Tier.GPU: "xavier_gpu_budget", Tier.CPU: "xavier_cpu_budget"}

Result = TypeVar("Result")


class Steering:
    """Steers one replica.

    Args:
        manager: decides for the replica.
        wake: makes an engine that waits for requests take a step.
        find: where the blocks of a prompt lie, by source; ``prompts.Prompts.find``.
    """

    def __init__(
        self,
        manager: XavierManager,
        wake: Callable[[], None],
        find: Callable[[Sequence[int], str | None], dict[str, int]],
    ) -> None:
        self._manager = manager
        self._wake = wake
        self._find = find
        self._commands: deque[tuple[Callable[[], Any], Future]] = deque()
        self._nudged = False
        self._resizes = Resizes(manager.ranks)
        self._tending: asyncio.Task[None] | None = None

    # -- the scheduler thread ------------------------------------------------------------------

    @property
    def wants_step(self) -> bool:
        """Whether the engine should take a step though it has no request."""
        return self._nudged or bool(self._commands)

    def step(self) -> list[ResizeOrder]:
        """Run what was asked for, and go on with changes; orders for the ranks."""
        self._nudged = False
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)
        if not self._resizes.changes:
            return []
        with self._manager.lock:
            return self._resizes.advance(self._manager.planner.resizer)

    def acknowledge(self, report: XavierWorkerMetadata) -> None:
        """What ranks report of their orders."""
        if not report.resized:
            return
        with self._manager.lock:
            over = self._resizes.acknowledge(self._manager.planner.resizer, report)
        for change in over:
            if change.problem is not None:
                continue
            self._manager.budgets[change.tier] = change.budget_bytes
            logger.info(
                "xavier: the %s tier has %d rows now (%d before)",
                *(change.tier.name, change.rows, change.old_rows),
            )

    # -- the bridge's event loop ---------------------------------------------------------------

    async def clear(self) -> dict[str, int]:
        """Forget every snapshot: rows freed now, and those freed when their users have ended."""
        now, later = await self._on_step(self._manager.clear)
        return {"removed_now": now, "removed_later": later}

    async def pause_stores(self, paused: bool) -> dict[str, bool]:
        """Store nothing new, or go on; what is stored stays in use."""
        self._manager.planner.paused = paused
        return {"paused": paused}

    async def doubt(self, keys: Sequence[bytes]) -> int:
        """A peer read other bytes than were stored under ``keys``: forget them; how many."""
        return await self._on_step(lambda: self._manager.doubt(keys))

    async def lookup(self, tokens: Sequence[int], cache_salt: str | None = None) -> dict[str, int]:
        """Tokens of a prompt by where they lie."""
        return self._find(tokens, cache_salt)

    async def resize(
        self, gpu_bytes: int | None, cpu_bytes: int | None, wait_seconds: float
    ) -> dict[str, Any]:
        """Change the tiers' budgets; None leaves one as it is. Waits up to ``wait_seconds``.

        Raises:
            OptionError: a budget that cannot be had. Then nothing is changed.
        """
        wanted = {Tier.GPU: gpu_bytes, Tier.CPU: cpu_bytes}
        asked = {tier: size for tier, size in wanted.items() if size is not None}
        available = available_memory()
        await self._on_step(lambda: self._begin(asked, available))
        if self._tending is None or self._tending.done():
            self._tending = asyncio.ensure_future(self._tend())
        await asyncio.wait({self._tending}, timeout=wait_seconds)
        failed = [self._resizes.problems[tier] for tier in asked if tier in self._resizes.problems]
        if failed:
            raise OptionError(f"The budgets stay as they were: {' '.join(failed)}.")
        return {"gpu": self._describe(Tier.GPU), "cpu": self._describe(Tier.CPU)}

    async def _tend(self) -> None:
        """Keep an idle engine stepping, slowly, until nothing is under way."""
        while self._resizes.changes:
            self._nudged = True
            self._wake()
            await asyncio.sleep(TEND_SECONDS)

    async def _on_step(self, command: Callable[[], Result]) -> Result:
        future: Future[Result] = Future()
        self._commands.append((command, future))
        self._wake()
        waiting = asyncio.wrap_future(future)
        await asyncio.wait({waiting}, timeout=COMMAND_SECONDS)
        if not waiting.done() and future.cancel():
            raise OptionError(
                f"The engine has taken no step for {COMMAND_SECONDS:g} seconds, so nothing was "
                "changed. Send it a request, or try again when it is less busy."
            )
        return await waiting

    # -- rules ---------------------------------------------------------------------------------

    def _begin(self, asked: dict[Tier, int], available_bytes: int) -> None:
        """Check every budget, then begin to change the tiers. On the scheduler thread."""
        rows = {tier: self._rows(tier, size) for tier, size in asked.items()}
        self._check_some_tier(rows)
        self._check_memory(rows, asked, available_bytes)
        with self._manager.lock:
            for tier, count in rows.items():
                self._resizes.begin(self._manager.planner.resizer, tier, count, asked[tier])
        for tier, size in asked.items():
            if tier not in self._resizes.changes:  # as many rows as before
                self._manager.budgets[tier] = size

    def _rows(self, tier: Tier, size: int) -> int:
        manager, option = self._manager, _OPTIONS[tier]
        if not manager.rank_row_bytes:
            raise OptionError("The engine is still starting. Try again when it has started.")
        if tier in self._resizes.changes:
            change = self._resizes.changes[tier]
            raise refusal(
                option, size, f"comes while the tier goes to {change.rows} rows", "Try again later."
            )
        most = (manager.capacity.most_gpu_rows, manager.capacity.most_cpu_rows)[tier]
        if not most and size:
            problem = "cannot be had: the tier was switched off at launch"
            raise refusal(option, size, problem, "Launch the model again with it.")
        row_bytes = manager.rank_row_bytes * manager.ranks
        too_small = budgets.row_problem(option, size, row_bytes)
        if too_small is not None:
            raise OptionError(too_small)
        if size // row_bytes > most:
            problem = "is more than this replica can grow to"
            remedy = f"Give {most * row_bytes} or less, or launch the model again with it."
            raise refusal(option, size, problem, remedy)
        return size // row_bytes

    def _check_some_tier(self, rows: dict[Tier, int]) -> None:
        left = {tier: self._target(tier) for tier in Tier} | rows
        if not any(left.values()):
            raise OptionError(
                "No tier would be left to keep snapshots in. Give one of xavier_gpu_budget and "
                "xavier_cpu_budget a size. To keep nothing for a while, pause stores and clear."
            )

    def _target(self, tier: Tier) -> int:
        change = self._resizes.changes.get(tier)
        return self._manager.planner.resizer.rows_of(tier).rows if change is None else change.rows

    def _check_memory(
        self, rows: dict[Tier, int], asked: dict[Tier, int], available_bytes: int
    ) -> None:
        capacity, more = self._manager.capacity, 0
        for tier, count in rows.items():
            grows = max(0, count - self._manager.planner.resizer.rows_of(tier).rows)
            more += grows * capacity.row_bytes if capacity.elastic[tier] else 0
        if more > available_bytes:
            given = " and ".join(f"{_OPTIONS[tier]}={size}" for tier, size in asked.items())
            raise OptionError(
                f"{given} takes {more} bytes more, and this machine or cgroup has "
                f"{available_bytes} left. Give less."
            )
        if Tier.CPU in asked:
            limit = budgets.locked_memory_limit()
            problem = budgets.memlock_problem(asked[Tier.CPU], limit)
            if problem is not None:
                raise OptionError(problem)

    def _describe(self, tier: Tier) -> dict[str, Any]:
        manager = self._manager
        held = manager.planner.resizer.rows_of(tier)
        change = self._resizes.changes.get(tier)
        reserved = (manager.capacity.most_gpu_rows, manager.capacity.most_cpu_rows)[tier]
        note = None
        if not manager.capacity.elastic[tier] and held.rows < reserved:
            size = format_size((reserved - held.rows) * manager.capacity.row_bytes)
            note = f"{size} beyond the budget stay allocated until the replica ends."
        row_bytes = manager.rank_row_bytes * manager.ranks
        budget = manager.budgets.get(tier, held.rows * row_bytes)
        return {
            "budget_bytes": budget if change is None else change.budget_bytes,
            "rows": held.rows,
            "rows_leaving": held.leaving,
            "state": "done" if change is None else change.state,
            "note": note,
        }
