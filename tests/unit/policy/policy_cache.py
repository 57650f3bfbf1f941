"""A cache of a few rows whose copies succeed at once, for tests of single behaviours."""

from __future__ import annotations

from policy_model import key_of

from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.planner import Planner
from xinference_xavier.types import NOWHERE, tier_of


class Cache:
    """A planner whose copies all succeed at once."""

    def __init__(self, gpu: int, cpu: int, low_water: int = 0, windows: tuple[int, ...] = ()):
        self.index = SnapshotIndex(gpu, cpu)
        self.planner = Planner(self.index, low_water, windows)
        self.counters = self.planner.counters
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def store(self, keys, mark=None, broken=None) -> list[bytes]:
        """Store as a request of its own, or more of request ``mark``; the keys stored."""
        plan = self.planner.admit(keys, mark or self.mark(), set() if broken is None else broken)
        self.planner.commit_store(plan, ok=True)
        self.index.validate()
        return plan.keys

    def load(self, keys) -> None:
        plan = self.planner.pin_for_load(keys, self.mark())
        self.planner.finish_load(plan)

    def step(self, storing=()) -> int:
        """One engine step's moves; how many snapshots moved."""
        plans = self.planner.plan_moves(storing)
        for plan in plans:
            self.planner.commit_move(plan, ok=True)
        self.index.validate()
        return sum(len(plan.keys) for plan in plans)

    def settle(self) -> int:
        """Steps until nothing moves; how many snapshots moved."""
        total = 0
        for _ in range(1000):
            moved = self.step()
            total += moved
            if not moved:
                return total
        raise AssertionError("moves never end")

    def tiers(self, keys) -> str:
        """One letter per key: G, C or - for a miss."""
        locations = map(self.index.where, keys)
        return "".join("-" if at == NOWHERE else "GC"[tier_of(at)] for at in locations)

    def skips(self) -> dict[str, int]:
        return {reason: count for reason, count in self.counters.skips.items() if count}


def prompt(number: int, blocks: int, group: int = 0) -> list[bytes]:
    return [key_of(2 * number, position, group) for position in range(blocks)]
