"""What to read from a peer, decided when a request arrives, and what came of it.

Covers: which prefix a peer has and we have not, whether it is worth it, and committing outcomes.
Does not cover the fetch (``actors/fetcher.py``) or the rows (``policy/fetches.py``). Decisions run
on the scheduler thread and wait for nothing; outcomes are committed on the bridge's thread, under
the manager's lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from xinference_xavier.actors.fetcher import FetchOrder, FetchOutcome, Landed
from xinference_xavier.engine.receipts import RequestState
from xinference_xavier.policy.planner import Planner
from xinference_xavier.policy.plans import FetchPlan
from xinference_xavier.policy.rates import Rates

#: Lengths tried from the longest down when a sliding window is not complete at a peer.
WINDOW_TRIES = 64


@dataclass(frozen=True)
class Group:
    """One KV group: tokens of its blocks, and blocks of its window (None: full attention)."""

    block_tokens: int
    window_blocks: int | None


@dataclass(frozen=True)
class Wanted:
    """Blocks that ``member`` has and this replica has not; ``tokens`` of prompt that they save."""

    member: str
    keys: list[bytes]
    tokens: int


#: The peer that holds most of the keys from a position on, and how many.
Longest = Callable[[Sequence[bytes], int], tuple[str | None, int]]
#: Whether a peer seems to hold a key.
Holds = Callable[[str, bytes], bool]


def choose(
    groups: Sequence[Group],
    primary: int,
    keys: Sequence[Sequence[bytes]],
    local: Callable[[bytes], bool],
    longest: Longest,
    holds: Holds,
) -> Wanted | None:
    """The longest prefix that one peer's blocks complete, or None.

    ``keys`` are the request's per group, in prefix order; ``primary`` is a group with full
    attention, whose blocks tell how far a prefix reaches.
    """
    own = keys[primary]
    start = next((i for i, key in enumerate(own) if not local(key)), len(own))
    if start == len(own):
        return None
    member, run = longest(own, start)
    if member is None:
        return None
    size, blocks = groups[primary].block_tokens, start + run
    tries = min(WINDOW_TRIES, run)
    span = range((blocks - tries + 1) * size, blocks * size + 1, size)
    others = {
        number: _Needs(groups[number], keys[number], span, local, partial(holds, member))
        for number in range(len(groups))
        if number != primary
    }
    tokens = next((t for t in reversed(span) if all(n.complete(t) for n in others.values())), None)
    if tokens is None:
        return None
    wanted: list[bytes] = []
    for number in range(len(groups)):  # in the order of the groups
        if number == primary:
            wanted += [key for key in own[start : tokens // size] if not local(key)]
        else:
            wanted += others[number].missing(tokens)
    return Wanted(member, wanted, tokens - start * size)


class _Needs:
    """Blocks of one group that prefixes of ``span`` tokens need; every key is looked up once."""

    def __init__(
        self,
        group: Group,
        keys: Sequence[bytes],
        span: range,
        local: Callable[[bytes], bool],
        remote: Callable[[bytes], bool],
    ) -> None:
        self._group = group
        self._first = self._blocks(span[0])[0]
        self._keys = keys[self._first : self._blocks(span[-1])[1]]
        self._local = [local(key) for key in self._keys]
        found = zip(self._keys, self._local, strict=True)
        self._lacks = [not here and not remote(key) for key, here in found]
        #: Blocks from the first on that are to be had.
        self._reach = next((i for i, lacks in enumerate(self._lacks) if lacks), len(self._lacks))

    def _blocks(self, tokens: int) -> tuple[int, int]:
        """First block, and the one after the last, that a prefix of ``tokens`` needs."""
        end = tokens // self._group.block_tokens
        window = self._group.window_blocks
        return 0 if window is None else max(0, end - window), end

    def complete(self, tokens: int) -> bool:
        """Whether this replica and the peer together have all that a prefix needs."""
        first, end = self._blocks(tokens)
        if first == self._first:
            return end - self._first <= self._reach
        return not any(self._lacks[first - self._first : end - self._first])

    def missing(self, tokens: int) -> list[bytes]:
        """What a complete prefix lacks here."""
        first, end = (block - self._first for block in self._blocks(tokens))
        pairs = zip(self._keys[first:end], self._local[first:end], strict=True)
        return [key for key, here in pairs if not here]


#: Fetches that have ended: the locations whose bytes did not arrive, None for all of them.
Ended = dict[int, frozenset[int] | None]


class Fetching:
    """Fetches of one replica.

    Args:
        lock: held while the planner changes.
        planner: reserves the rows.
        min_tokens: fewest tokens worth fetching, or "auto" for the measured break-even.
        block_tokens: tokens per block of the counted group.
    """

    def __init__(
        self,
        lock: threading.Lock,
        planner: Planner,
        min_tokens: int | Literal["auto"],
        block_tokens: int,
    ) -> None:
        self._lock = lock
        self._planner = planner
        self._min_tokens = min_tokens
        self._block_tokens = block_tokens
        self.rates = Rates()
        self.fetches = 0
        self.failures: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.seconds = 0.0
        self.read_seconds = 0.0
        #: Told of each fetch that ends, and whether it failed, with the lock held.
        self.on_end: Callable[[int, bool], None] = lambda fetch_id, failed: None
        self._steps: deque[tuple[int, float]] = deque(maxlen=8)
        self._step_ended = 0.0
        #: Fetches whose end some rank may not know, with the locations that hold nothing.
        self._untold: Ended = {}

    def worth(self, tokens: int) -> bool:
        """Whether a prefix of ``tokens`` is worth reading from a peer."""
        least = self.rates.break_even_tokens() if self._min_tokens == "auto" else self._min_tokens
        return tokens >= least

    def begin(self, wanted: Wanted, state: RequestState) -> FetchOrder | None:
        """Reserve the rows; the order for the bridge, or None if nothing is to be fetched."""
        if not self.worth(wanted.tokens):
            self.skipped["too_short"] += 1
            return None
        with self._lock:
            plan = self._plan(wanted, state.mark)
        if plan is None:
            self.skipped["no_room"] += 1
            return None
        state.fetch_id = plan.fetch_id
        state.fetched_keys = frozenset(plan.keys)
        self.fetches += 1
        deadline_seconds = self.rates.deadline_seconds(wanted.tokens)
        return FetchOrder(plan.fetch_id, wanted.member, plan.keys, plan.locations, deadline_seconds)

    def _plan(self, wanted: Wanted, mark: int) -> FetchPlan | None:
        """Rows for all of it, or for a head that is worth it; None without.

        The keys of several KV groups are of no use but together.
        """
        fetches, count = self._planner.fetches, len(wanted.keys)
        several = not self._planner.index.hit_while_fetching
        found = min(count, fetches.room())
        if self._fits(found, wanted, several):
            plan = self._planner.plan_fetch(wanted.keys[:found], mark)
            if plan is None or self._fits(len(plan.keys), wanted, several):
                return plan
            plan.held = False
            fetches.commit(plan.fetch_id, range(len(plan.keys)))
        return None

    def _fits(self, found: int, wanted: Wanted, several: bool) -> bool:
        if found == len(wanted.keys):
            return True
        return found > 0 and not several and self.worth(found * self._block_tokens)

    def release(self, state: RequestState) -> None:
        """The request has pinned what it loads, or ends: drop what was kept for it."""
        if state.fetch_id is not None:
            with self._lock:
                self._planner.fetches.release(state.fetch_id)
            state.fetch_id = None

    def ended(self, outcome: FetchOutcome | Landed) -> None:
        """Commit an outcome. On the bridge's thread."""
        with self._lock:
            if isinstance(outcome, Landed):
                self._planner.fetches.settle(outcome.fetch_id)
                return
            plan = self._planner.fetches.commit(
                outcome.fetch_id, outcome.failed, outcome.quarantined
            )
            if plan is None:
                return
            if outcome.untold:
                lost = frozenset(plan.locations[position] for position in outcome.failed)
                self._untold[plan.fetch_id] = None if len(lost) == len(plan.keys) else lost
            self.on_end(plan.fetch_id, bool(outcome.reason))
        self.seconds += outcome.seconds
        self.read_seconds += outcome.read_seconds
        if outcome.reason:
            self.failures[outcome.reason] += 1
        tokens = (len(plan.keys) - len(outcome.failed)) * self._block_tokens
        self.rates.note_fetch(tokens, outcome.read_seconds, outcome.seconds)

    def take_untold(self) -> Ended:
        """What the ranks are to be told with the next step, lest loads wait for nothing."""
        if not self._untold:
            return {}
        with self._lock:
            untold, self._untold = self._untold, {}
        return untold

    def step_begins(self, tokens: int) -> None:
        """A step computes ``tokens``; measured from here to its end, the oldest step first.

        vLLM does not report the end of steps that compute nothing.
        """
        if tokens:
            self._steps.append((tokens, time.perf_counter()))

    def step_ends(self) -> None:
        if self._steps:
            tokens, began = self._steps.popleft()
            now = time.perf_counter()
            # One scheduled while another ran has been computed since that one's end.
            self.rates.note_step(tokens, now - max(began, self._step_ended))
            self._step_ended = now

    def as_dict(self) -> Mapping[str, object]:
        """Numbers for the API."""
        return {
            "fetches": self.fetches,
            "fetch_failures": dict(self.failures),
            "fetches_skipped": dict(self.skipped),
            "fetch_seconds": round(self.seconds, 6),
            "read_seconds": round(self.read_seconds, 6),
            "min_fetch_tokens": self.rates.break_even_tokens()
            if self._min_tokens == "auto"
            else self._min_tokens,
        }
