"""Random lives of a replica: arrivals, aborts, resets, slow and failing copies, clears and changes
of its budgets, in any order.

After every step each snapshot holds its bytes on every rank and the index is consistent; at the end
every request that was not aborted has its answer, and nothing is left over.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from checks import check_rest, check_step
from gated_copier import ALL
from harness import Replica
from hypothesis import event, given, settings
from hypothesis import strategies as st
from operator_calls import begin, begin_resize, finish_changes
from shapes import HYBRID, PP2, TP2, Shape
from test_bytes import prompt
from vllm.v1.request import Request

from xinference_xavier.storage.copier import CopyKind


def ask(replica: Replica, draw: random.Random) -> None:
    """One of four texts, so that prefixes repeat."""
    replica.ask(prompt(draw.randrange(4), draw.randint(1, 60)), draw.randint(1, 14))


def carry_on(replica: Replica, draw: random.Random) -> None:
    """The next turn of a conversation."""
    if not replica.asked:
        return
    asked = draw.choice(list(replica.asked.values()))
    turn = [*asked.prompt, *asked.answer, *prompt(9, draw.randint(1, 9))]
    if len(turn) < replica.shape.max_model_len - 8:
        replica.ask(turn, draw.randint(1, 6))


def abort(replica: Replica, draw: random.Random) -> None:
    living = [req_id for req_id, asked in replica.asked.items() if asked.finished is None]
    if not living:
        return
    if draw.random() < 0.5:
        replica.step(abort_late=[draw.choice(living)])
    else:
        replica.abort(draw.choice(living))


def forget(replica: Replica, draw: random.Random) -> None:
    """The engine's own cache; only works while no request runs."""
    replica.scheduler.reset_prefix_cache()


def reset(replica: Replica, draw: random.Random) -> None:
    if replica.connector.connector_scheduler._current_batch_jobs_to_flush:
        return  # vLLM refuses a second reset before the next step
    loading = any(r not in replica.scheduler.running for r in holding_blocks(replica))
    if draw.random() < 0.5:
        replica.scheduler.reset_connector_cache()
    elif replica.depth == 1 and not loading:  # vLLM refuses otherwise
        replica.reset(preempt=True)


def holding_blocks(replica: Replica) -> list[Request]:
    blocks = replica.scheduler.kv_cache_manager.get_block_ids
    return [r for r in replica.scheduler.requests.values() if any(blocks(r.request_id))]


def pace(replica: Replica, draw: random.Random) -> None:
    gate = draw.choice(replica.ranks).copier.gate
    gate.run, gate.report = draw.choice([0, 1, 2, ALL]), draw.choice([0, 1, 2, ALL])
    gate.shuffle = draw.choice([None, draw])


def fail(replica: Replica, draw: random.Random) -> None:
    lost = draw.choice([None, [draw.randrange(6)], draw.sample(range(12), 3)])
    draw.choice(replica.ranks).copier.gate.fail(draw.choice(list(CopyKind)), lost)


def step(replica: Replica, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 8)):
        replica.step()
        check_step(replica)


def clear(replica: Replica, draw: random.Random) -> None:
    begin(replica, replica.manager.clear)


def resize(replica: Replica, draw: random.Random) -> None:
    """A tier that is there gets another size; refused while it is on its way to one."""
    tier = draw.choice([t for t in ("gpu", "cpu") if getattr(replica.shape, f"{t}_rows")])
    begin_resize(replica, **{tier: draw.choice([1, 2, 5, 9, 20, 40, 70])})


def pause(replica: Replica, draw: random.Random) -> None:
    replica.manager.planner.paused = draw.random() < 0.3


def rest(replica: Replica, draw: random.Random) -> None:
    replica.run()
    finish_changes(replica)
    replica.run()
    check_rest(replica)


WEIGHTS = {
    ask: 20,
    carry_on: 10,
    step: 40,
    forget: 10,
    rest: 4,
    abort: 5,
    reset: 3,
    pace: 10,
    fail: 5,
    clear: 2,
    resize: 6,
    pause: 3,
}
COUNTED = (
    ("loads", CopyKind.LOAD, True),
    ("failed loads", CopyKind.LOAD, False),
    ("moves", CopyKind.MOVE, True),
)
SHAPES = {
    "tp2": replace(TP2, batch_tokens=24),
    "pp2": replace(PP2, batch_tokens=24),
    "hybrid": replace(HYBRID, batch_tokens=24, blocks=45),
    "overlapped": replace(TP2, batch_tokens=24, overlapped=True),
    "gpu only": replace(TP2, cpu_rows=0),
    "cpu only": replace(TP2, gpu_rows=0, cpu_rows=20),
    "tiny tiers": replace(TP2, gpu_rows=4, cpu_rows=6, overlapped=True),
    "reuse": replace(TP2, batch_tokens=24, overlapped=True, options={"xavier_policy": "reuse"}),
    "reuse, hybrid": replace(
        HYBRID, batch_tokens=24, blocks=45, options={"xavier_policy": "reuse"}
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@settings(max_examples=settings.default.max_examples // 20)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_schedule(model_config: Path, shape: Shape, seed: int) -> None:
    draw = random.Random(seed)
    replica = Replica(shape, model_config)
    try:
        for _ in range(100):
            (act,) = draw.choices(list(WEIGHTS), WEIGHTS.values())
            act(replica, draw)
            check_step(replica)
        rest(replica, draw)
    finally:
        replica.shutdown()
    done = {name: sum(r.copier.done[kind, ok] for r in replica.ranks) for name, kind, ok in COUNTED}
    event(f"loads: {done['loads'] > 3}, moves: {done['moves'] > 3}")
    event(f"relocated: {replica.counters.relocations > 0}")
    event(f"failed loads: {done['failed loads'] > 0}")
    event(f"preempted: {any(request.num_preemptions for request in replica.requests)}")
