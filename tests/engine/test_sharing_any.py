"""Random requests and faults on two replicas: right tokens, and nothing left over.

What happens depends on threads, so a seed says which acts, not their interleaving.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest
from checks import check_step
from faults import HeldReads, answers_again, deaf, failing_reads, quiet, silent_leases
from harness import Replica
from hypothesis import settings
from shapes import BLOCK, HYBRID, PP2, TP2, Shape
from sharing_cluster import Cluster, finish, until, usable
from test_bytes import prompt
from vllm.v1.request import RequestStatus

from xinference_xavier.storage.copier import CopyKind

pytestmark = quiet

SHAPES = {
    "tp2": TP2,
    "pp2": PP2,
    "hybrid": replace(HYBRID, blocks=45),
    "overlapped": replace(TP2, overlapped=True),
    "tiny tiers": replace(TP2, gpu_rows=6, cpu_rows=14),
}
#: For each seed and shape.
SECONDS = 3.0
SEEDS = range(settings.default.max_examples // 200)  # type: ignore[attr-defined]
PROMPTS = 40


@dataclass
class Play:
    """One run: what is broken now, and how to heal it."""

    cluster: Cluster
    draw: random.Random
    broken: dict[str, Callable[[], object]] = field(default_factory=dict)
    asked: int = 0
    last: int = 0

    def one(self) -> Replica:
        return self.draw.choice(self.cluster.replicas)

    def heal(self) -> None:
        for mend in self.broken.values():
            mend()
        self.broken.clear()
        for rank in [rank for replica in self.cluster.replicas for rank in replica.ranks]:
            for planned in rank.copier.gate.failures.values():
                planned.clear()

    def break_once(self, name: str, start: Callable[[], Callable[[], object]]) -> None:
        """Break something, or mend it if it is broken."""
        if name in self.broken:
            self.broken.pop(name)()
        else:
            self.broken[name] = start()


def ask(play: Play) -> None:
    replica, draw = play.one(), play.draw
    play.last = draw.choice([draw.randrange(PROMPTS), play.last])
    tokens = prompt(play.last, draw.choice([5 * BLOCK + 1, 8 * BLOCK, 30]))
    for number in range(draw.choice([1, 1, 1, 4])):
        replica.ask([*tokens, number], draw.choice([1, 1, 6]))
    play.asked += 1


def step(play: Play) -> None:
    for replica in play.cluster.replicas:
        for _ in range(play.draw.randint(1, 8)):
            replica.step()
        check_step(replica)


def wait(play: Play) -> None:
    for replica in play.cluster.replicas:
        if not any(name.startswith("reads") for name in play.broken):
            finish(replica)
    time.sleep(play.draw.choice([0.0, 0.03]))


def abort(play: Play) -> None:
    replica = play.one()
    alive = [
        request.request_id
        for request in replica.requests
        if not RequestStatus.is_finished(request.status)
    ]
    if alive:
        replica.abort(play.draw.choice(alive))


def forget(play: Play) -> None:
    play.one().scheduler.reset_prefix_cache()


def clear(play: Play) -> None:
    replica = play.one()
    if not replica.connector.connector_scheduler._current_batch_jobs_to_flush:
        replica.scheduler.reset_connector_cache()


def fail_load(play: Play) -> None:
    gate = play.draw.choice(play.one().ranks).copier.gate
    gate.fail(CopyKind.LOAD, play.draw.choice([None, [0], [2, 3]]))


def break_tracker(play: Play) -> None:
    tracker, draw = play.cluster.tracker, play.draw

    def stop() -> Callable[[], object]:
        tracker.stop()
        return lambda: tracker.start(tracker=draw.random() < 0.5)

    play.break_once("tracker", stop)


def break_reads(play: Play) -> None:
    number = play.draw.randrange(2)
    replica, rank = play.cluster.replicas[number], play.draw.randrange(2)
    late = play.draw.random() < 0.5

    def start() -> Callable[[], object]:
        if play.draw.random() < 0.5:
            return failing_reads(replica, rank)
        return HeldReads(replica, rank, late=late).land

    play.break_once(f"reads of {number}", start)


def break_calls(play: Play) -> None:
    number = play.draw.randrange(2)
    how = play.draw.choice([silent_leases, deaf])

    def start() -> Callable[[], object]:
        stack = ExitStack()
        stack.enter_context(how(play.cluster.replicas[number]))
        return stack.close

    play.break_once(f"calls to {number}", start)


WEIGHTS = {
    ask: 25,
    step: 40,
    wait: 15,
    abort: 5,
    forget: 10,
    clear: 3,
    fail_load: 2,
    break_reads: 4,
    break_calls: 4,
    break_tracker: 1,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_any_requests_and_faults(quick_cluster: Cluster, shape: Shape, seed: int) -> None:
    play = Play(quick_cluster, random.Random(seed))
    first, second = quick_cluster.pair(shape)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        (act,) = play.draw.choices(list(WEIGHTS), WEIGHTS.values())
        act(play)
    play.heal()
    for replica in (first, second):
        finish(replica)
        fetches = replica.manager.planner.fetches
        until(lambda: not fetches.quarantined_rows, "late bytes to land")  # noqa: B023
        fetching = replica.manager.fetching
        print(play.asked, "asked", fetching.as_dict())
    until(lambda: usable(first) and usable(second), "both to meet again")
    until(lambda: not first.manager.leases.rows + second.manager.leases.rows, "leases to end")
    if shape.cpu_rows > 20:
        answers_again(quick_cluster, first, second, 3 * PROMPTS)
