"""What the cache has won and what it has cost, in seconds.

``net = saved - load_wait - fetch_wait - failed_fetch - copy - scheduler``, where

- ``saved``: prompt tokens that were loaded and not computed, times the measured seconds per
  computed token at that time (``policy/rates.py``). Tokens loaded before anything was measured
  are priced at the first measurement. Tokens of the engine's own prefix cache count for nothing.
- ``load_wait``: from a load's plan to its last rank's acknowledgement, and lookups put off because
  a block was still being written: the request does nothing meanwhile.
- ``fetch_wait``, ``failed_fetch``: the part of such waits that was spent on a read from a peer, by
  whether the read worked. A read that ends before its request is scheduled costs nothing.
- ``copy``: stores and moves of one rank that may have slowed a step. With KV caches in RAM that is
  all of them: a copy takes memory bandwidth, and maybe a core, from the step it runs beside, or the
  step waits for it. On a GPU it is the stores, which share its compute units; moves use the copy
  engines beside them. Loads are in ``load_wait``.
- ``scheduler``: time within this package's connector on the scheduler thread, vLLM's own part of
  it included.

Every cost is counted in full even where it overlaps another one or delays nobody, so ``net`` is a
lower bound of what was won, as far as seconds per token are right: they are an average over recent
steps. Tokens late in a long prompt cost more than that, those of a short one less. Seconds of
several requests add up.

Runs on the scheduler thread, at a constant cost per request and step; other threads read. Ends of
fetches arrive on the bridge's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from xinference_xavier.engine.receipts import RequestState, Totals

#: Ends of fetches that a load may still ask for.
ENDS_KEPT = 256

#: Copies that may slow a step, by where the KV caches are.
SLOWING_ON_CPU, SLOWING_ON_GPU = ("store", "move"), ("store",)

Method = TypeVar("Method", bound=Callable[..., Any])


class Accounts:
    """Seconds of one replica.

    Args:
        token_seconds: measured seconds per computed prompt token; None before the first prefill.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        token_seconds: Callable[[], float | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._token_seconds = token_seconds
        self.clock = clock
        #: Kinds of copies that are a cost here.
        self.slowing: Collection[str] = SLOWING_ON_CPU
        self.saved_seconds = 0.0
        self.load_wait_seconds = 0.0
        self.fetch_wait_seconds = 0.0
        self.failed_fetch_seconds = 0.0
        self.scheduler_seconds = 0.0
        #: Loaded tokens that have been priced.
        self._priced_tokens = 0
        #: Fetch -> when it ended, and whether it failed.
        self._ends: dict[int, tuple[float, bool]] = {}

    def price(self, totals: Totals) -> None:
        """Count what all requests so far have loaded."""
        token_seconds = self._token_seconds()
        if token_seconds is None:
            return
        loaded = totals.tokens_gpu + totals.tokens_cpu + totals.tokens_peer
        self.saved_seconds += (loaded - self._priced_tokens) * token_seconds
        self._priced_tokens = loaded

    def defer(self, state: RequestState) -> None:
        """The request's lookup was put off; the first time counts."""
        if state.deferred_at is None:
            state.deferred_at = self.clock()

    def resume(self, state: RequestState) -> None:
        """The request's lookup was answered, or is no longer wanted."""
        if state.deferred_at is not None:
            fetches = () if state.fetch_id is None else (state.fetch_id,)
            self.waited(state.deferred_at, fetches)
            state.deferred_at = None

    def waited(self, since: float, fetches: Collection[int], failed: bool = False) -> None:
        """A request has waited for its blocks ``since``, at first for ``fetches`` to end.

        ``failed``: not all blocks came. A rank may say so before the bridge tells of the fetch's
        end; a fetch that nobody has told of is then one that failed.
        """
        now = self.clock()
        ends = [self._ends.get(fetch_id, (now, failed)) for fetch_id in fetches]
        end = min(now, max((at for at, _ in ends), default=since))
        reading = max(0.0, end - since)
        if any(broken for _, broken in ends):
            self.failed_fetch_seconds += reading
        else:
            self.fetch_wait_seconds += reading
        self.load_wait_seconds += now - since - reading

    def fetch_ended(self, fetch_id: int, failed: bool) -> None:
        """A fetch has ended. With the manager's lock held, on any thread."""
        self._ends[fetch_id] = (self.clock(), failed)
        while len(self._ends) > ENDS_KEPT:
            self._ends.pop(next(iter(self._ends)), None)

    def as_dict(self, copied: Mapping[str, Any], ranks: int) -> dict[str, float | None]:
        """Numbers for the API. ``copied``: seconds of copies by kind, summed over ``ranks``."""
        copies = sum(work.seconds for kind, work in copied.items() if kind in self.slowing)
        costs = {
            "load_wait_seconds": self.load_wait_seconds,
            "fetch_wait_seconds": self.fetch_wait_seconds,
            "failed_fetch_seconds": self.failed_fetch_seconds,
            "copy_seconds": copies / max(1, ranks),
            "scheduler_seconds": self.scheduler_seconds,
        }
        net = self.saved_seconds - sum(costs.values())
        seconds = {"saved_seconds": self.saved_seconds, **costs, "net_seconds": net}
        token_seconds = self._token_seconds()
        speed = None if token_seconds is None else round(1 / token_seconds, 3)
        rounded: dict[str, float | None] = {name: round(s, 6) for name, s in seconds.items()}
        return {**rounded, "prefill_tokens_per_second": speed}


def accounted(method: Method) -> Method:
    """Count a connector method's time as that of the scheduler thread."""

    @functools.wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        accounts = self._manager.accounts
        began = accounts.clock()
        try:
            return method(self, *args, **kwargs)
        finally:
            accounts.scheduler_seconds += accounts.clock() - began

    return timed  # type: ignore[return-value]
