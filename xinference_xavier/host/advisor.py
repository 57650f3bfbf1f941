"""What to change, said from what was measured.

Pure functions of one model's newest view and its history. Every sentence names its evidence; where
nothing was measured, nothing is said. Seconds are prefill seconds at the measured speed, within the
window that was looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from xinference_xavier.budgets import shadow_warning
from xinference_xavier.config import format_size
from xinference_xavier.host.history import Point
from xinference_xavier.host.summary import net_growth
from xinference_xavier.host.view import ModelView
from xinference_xavier.policy.ghosts import PERCENTS

#: How far back is looked, and the shortest past that anything is concluded from.
WINDOW_SECONDS, LEAST_SECONDS = 600.0, 60.0
#: Fewest blocks, and seconds, that are worth a sentence.
LEAST_BLOCKS, LEAST_WORTH_SECONDS = 16, 0.1
#: A larger tier is proposed that would have kept this share of what came back.
KEPT_SHARE = 0.8

Kind = Literal["harm", "cpu_budget", "gpu_budget", "min_fetch", "conflict"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence.

    ``seconds``: what it would have saved within the window; 0 where that was not measured.
    ``budgets``: launch options with the bytes per replica that are proposed. ``pause_stores``:
    whether pausing stores is offered.
    """

    kind: Kind
    text: str
    seconds: float = 0.0
    budgets: Mapping[str, int] = field(default_factory=dict)
    pause_stores: bool = False


def advise(model: ModelView, history: Sequence[Point]) -> list[Advice]:
    """Advice for one model, the most urgent first: harm, then by the seconds at stake."""
    every = [replica.stats for replica in model.replicas if replica.stats is not None]
    if not every:
        return []
    found: list[Advice | None] = [_conflict(every)]
    window = _window(history)
    if window is not None:
        spent = _Spent(window, every)
        found += [_harm(spent), _larger_tier(spent), _larger_gpu(spent), _costly_fetches(spent)]
    advice = [each for each in found if each is not None]
    return sorted(advice, key=lambda each: (each.kind != "harm", -each.seconds))


def _window(history: Sequence[Point]) -> tuple[Point, Point] | None:
    """The first and the last point of the window; None if it is too short."""
    if not history:
        return None
    last = history[-1]
    first = next(p for p in history if last.monotonic - p.monotonic <= WINDOW_SECONDS)
    return (first, last) if last.monotonic - first.monotonic >= LEAST_SECONDS else None


class _Spent:
    """What happened within the window, over all replicas."""

    def __init__(self, window: tuple[Point, Point], every: Sequence[Mapping[str, Any]]) -> None:
        self._first = window[0]
        self._last = window[1]
        self.net_seconds = net_growth(window[0].grown, window[1].grown)
        self.replicas = len(every)
        self.stats = every[0]
        self.cpu_rows = min(stats["tiers"]["cpu"]["rows"] for stats in every)
        self.gpu_rows = min(stats["tiers"]["gpu"]["rows"] for stats in every)
        speeds = [(s.get("accounts") or {}).get("prefill_tokens_per_second") for s in every]
        known = [speed for speed in speeds if speed]
        #: Seconds to compute one token; None while nobody has measured it.
        self.token_seconds = len(known) / sum(known) if known else None

    def grown(self, path: str) -> float:
        return self._last.grown[path] - self._first.grown[path]

    @property
    def past(self) -> str:
        """The window in words."""
        minutes = round((self._last.monotonic - self._first.monotonic) / 60)
        return "the last minute" if minutes <= 1 else f"the last {minutes} minutes"

    def budget(self, tier: str) -> int:
        """Bytes of one replica's tier: what its rows take."""
        return _whole(self.stats["tiers"][tier]["rows"] * self.stats["row_bytes"])

    def block_seconds(self) -> float | None:
        """What loading a block saves: computing its tokens, less copying it."""
        if self.token_seconds is None:
            return None
        tokens: float = self.stats["block_tokens"] / self.stats["kv_groups"]
        copied = self.grown("copies.load.nbytes")
        copying = self.grown("copies.load.seconds") / copied if copied else 0.0
        rank_bytes: float = self.stats["row_bytes"] / self.stats["ranks"]
        saved: float = tokens * self.token_seconds - copying * rank_bytes
        return max(0.0, saved)


def _harm(spent: _Spent) -> Advice | None:
    lost = -spent.net_seconds
    if lost < LEAST_WORTH_SECONDS:
        return None
    costs = {
        "waiting for loads": spent.grown("accounts.load_wait_seconds"),
        "waiting for other replicas": spent.grown("accounts.fetch_wait_seconds")
        + spent.grown("accounts.failed_fetch_seconds"),
        "copies": spent.grown("accounts.copy_seconds"),
        "bookkeeping": spent.grown("accounts.scheduler_seconds"),
    }
    worst = max(costs, key=lambda name: costs[name])
    saved = spent.grown("accounts.saved_seconds")
    text = (
        f"In {spent.past} the cache cost {_seconds(lost)} more than the {_seconds(saved)} of "
        f"prefill that it saved, most of it by {worst}: pause stores until prompts repeat."
    )
    return Advice("harm", text, lost, pause_stores=True)


def _larger_tier(spent: _Spent) -> Advice | None:
    """The last tier dropped what was computed again, and a larger one would have kept it."""
    returned = [spent.grown(f"reuse.returned_{percent}") for percent in PERCENTS]
    total, worth = sum(returned), spent.block_seconds()
    if total < LEAST_BLOCKS or not worth:
        return None
    kept, chosen = 0.0, PERCENTS[-1]
    for percent, blocks in zip(PERCENTS, returned, strict=True):
        kept += blocks
        if kept >= KEPT_SHARE * total:
            chosen = percent
            break
    seconds = kept * worth
    if seconds < LEAST_WORTH_SECONDS:
        return None
    last = "cpu" if spent.cpu_rows else "gpu"
    budget = spent.budget("cpu")
    proposed = _whole(budget + spent.budget(last) * chosen // 100)
    text = (
        f"A xavier_cpu_budget of {format_size(proposed)} instead of {format_size(budget)} per "
        f"replica would have kept about {kept:.0f} of the blocks that were dropped and computed "
        f"again in {spent.past}: {_seconds(seconds)} of prefill."
    )
    return Advice("cpu_budget", text, seconds, {"xavier_cpu_budget": proposed})


def _larger_gpu(spent: _Spent) -> Advice | None:
    """Snapshots return to the GPU tier, and as many leave it."""
    promoted = spent.grown("counters.promotions")
    demoted = spent.grown("counters.demotions")
    back_and_forth = min(promoted, demoted)
    if back_and_forth < max(LEAST_BLOCKS, spent.gpu_rows * spent.replicas / 4):
        return None
    moving = spent.grown("copies.move.seconds") / spent.stats["ranks"]
    seconds = moving * 2 * back_and_forth / (promoted + demoted)
    if seconds < LEAST_WORTH_SECONDS:
        return None
    budget = spent.budget("gpu")
    missing = int(back_and_forth / spent.replicas) * spent.stats["row_bytes"]
    proposed = _whole(budget + min(budget, missing))
    text = (
        f"In {spent.past} {promoted:.0f} snapshots returned to the GPU tier and {demoted:.0f} left "
        f"it: a xavier_gpu_budget of {format_size(proposed)} instead of {format_size(budget)} per "
        f"replica would spare about {_seconds(seconds)} of copies."
    )
    return Advice("gpu_budget", text, seconds, {"xavier_gpu_budget": proposed})


def _costly_fetches(spent: _Spent) -> Advice | None:
    """Requests waited longer for other replicas than computing would have taken."""
    waited = spent.grown("accounts.fetch_wait_seconds")
    waited += spent.grown("accounts.failed_fetch_seconds")
    if spent.token_seconds is None:
        return None
    saved = spent.grown("counters.tokens_peer") * spent.token_seconds
    if waited - saved < LEAST_WORTH_SECONDS:
        return None
    text = (
        f"In {spent.past} requests waited {_seconds(waited)} for blocks of other replicas, which "
        f"saved {_seconds(saved)} of prefill: set a higher xavier_min_fetch, or xavier_share=off."
    )
    return Advice("min_fetch", text, waited - saved)


def _conflict(every: Sequence[Mapping[str, Any]]) -> Advice | None:
    """Some replica's CPU tier is smaller than its engine's own KV pool."""
    for stats in every:
        tokens, rows = stats["block_tokens"], stats["tiers"]["cpu"]["rows"]
        warning = shadow_warning(rows * tokens, stats["pool_blocks"] * tokens)
        if warning is not None:
            proposed = _whole(2 * stats["pool_blocks"] * stats["row_bytes"])
            text = f"{warning} {format_size(proposed)} would hold twice the pool."
            return Advice("conflict", text, 0.0, {"xavier_cpu_budget": proposed})
    return None


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _whole(nbytes: int) -> int:
    """Rounded up to whole MiB: a size that people read and type."""
    return -(-int(nbytes) // 2**20) * 2**20
