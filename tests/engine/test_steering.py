"""What an operator does to a replica that has no request, or many: nothing waits, no byte is lost.

Engines that wait for requests are the business of the test of real ones (``e2e``): here the replica
steps whenever vLLM's loop would.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checks import check_rest, check_step
from harness import MakeReplica, Replica
from operator_calls import begin, begin_resize, finish_changes, steer, steering_of
from shapes import BLOCK, HYBRID, PP2, TP2, Shape
from test_bytes import prompt

from xinference_xavier.engine import steering as steering_module
from xinference_xavier.policy.columns import ZOMBIE
from xinference_xavier.types import OptionError, Tier, tier_of

SHAPES = {
    "tp2": TP2,
    "pp2": PP2,
    "hybrid": HYBRID,
    "overlapped": replace(TP2, overlapped=True),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def size(replica: Replica, rows: int) -> int:
    return rows * replica.manager.rank_row_bytes * replica.manager.ranks


def rows(replica: Replica) -> tuple[int, int]:
    return replica.manager.index.gpu.rows, replica.manager.index.cpu.rows


def tiers_of(replica: Replica, tokens: list[int]) -> dict[str, int]:
    return steering_of(replica)._find(tokens, None)


# -- clear -------------------------------------------------------------------------------------


@every_shape
def test_a_clear_forgets_everything_and_nothing_of_the_engines(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    for number in range(3):
        replica.answer(prompt(number, 5 * BLOCK), 2)
    held = len(replica.manager.index)
    assert held >= 15
    assert steer(replica, lambda s: s.clear()) == {"removed_now": held, "removed_later": 0}
    assert len(replica.manager.index) == 0
    again = replica.answer(prompt(2, 5 * BLOCK), 2)
    assert again.cached is not None
    assert again.cached >= 4 * BLOCK, "vLLM's own prefix cache is not touched"
    replica.forget()
    assert replica.answer(prompt(0, 5 * BLOCK), 2).cached == 0
    replica.forget()
    assert replica.answer(prompt(0, 5 * BLOCK), 2).cached == 5 * BLOCK - 1


@every_shape
def test_rows_of_jobs_in_flight_are_free_when_these_have_ended(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    replica.answer(prompt(1, 8 * BLOCK + 1), 2)
    replica.forget()
    for rank in replica.ranks:
        rank.copier.gate.run = 0
    replica.ask(prompt(1, 8 * BLOCK + 1), 2)  # loads
    replica.ask(prompt(2, 6 * BLOCK + 1), 2)  # stores
    for _ in range(6):
        replica.step()
    pinned = sum(map(bool, replica.manager.index.gpu.pins))
    pinned += sum(map(bool, replica.manager.index.cpu.pins))
    assert pinned >= 8
    held = len(replica.manager.index)
    answer = steer(replica, lambda s: s.clear())
    assert answer["removed_later"] >= 8
    assert answer["removed_now"] + answer["removed_later"] >= held
    zombies = sum(t.counts[ZOMBIE] for t in (replica.manager.index.gpu, replica.manager.index.cpu))
    assert zombies >= answer["removed_later"]
    replica.run()
    check_rest(replica)
    replica.forget()
    assert replica.answer(prompt(1, 8 * BLOCK + 1), 2).cached == 0


def test_what_runs_stores_no_tails_of_what_was_cleared(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    replica.ask(prompt(1, 5 * BLOCK), 20)
    for _ in range(8):
        replica.step()
    steer(replica, lambda s: s.clear())
    replica.run()
    assert len(replica.manager.index) == 0
    assert replica.counters.skips["prefix_not_stored"] > 0


# -- budgets -----------------------------------------------------------------------------------


@every_shape
def test_a_smaller_gpu_tier_demotes(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(shape)
    asked = prompt(1, 5 * BLOCK + 1)
    replica.answer(asked, 1)
    replica.answer(prompt(2, 5 * BLOCK + 1), 1)
    held, was = len(replica.manager.index), rows(replica)
    answer = steer(replica, lambda s: s.resize(size(replica, 3), None, 10))
    assert answer["gpu"] == {
        "budget_bytes": size(replica, 3),
        "rows": 3,
        "rows_leaving": 0,
        "state": "done",
        "note": None,
    }
    assert rows(replica) == (3, was[1])
    assert len(replica.manager.index) == held, "everything fits into the CPU tier"
    assert replica.counters.evictions_gpu == 0
    assert {rank.connector._worker._slabs[0].rows for rank in replica.ranks} == {3}
    replica.forget()
    assert replica.answer(asked, 1).cached == 5 * BLOCK


def test_without_room_in_the_cpu_tier_the_oldest_go(make_replica: MakeReplica) -> None:
    replica = make_replica(replace(TP2, gpu_rows=12, cpu_rows=0))
    for number in range(2):
        replica.answer(prompt(number, 5 * BLOCK), 1)
    steer(replica, lambda s: s.resize(size(replica, 6), None, 10))
    assert replica.counters.evictions_gpu == 4
    assert tiers_of(replica, prompt(1, 5 * BLOCK))["not_cached"] == 0
    replica.forget()
    assert tiers_of(replica, prompt(1, 5 * BLOCK))["gpu"] == 5 * BLOCK, "the newer prompt stays"


@every_shape
def test_a_smaller_cpu_tier_keeps_what_was_used_last(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    for number in range(6):
        replica.answer(prompt(number, 5 * BLOCK + 1), 1)
    replica.run()
    steer(replica, lambda s: s.resize(None, size(replica, 12), 10))
    assert rows(replica)[1] == 12
    assert len(replica.manager.index) <= rows(replica)[0] + 12
    replica.forget()
    found = tiers_of(replica, prompt(5, 5 * BLOCK + 1))
    assert found["prefix"] == 5 * BLOCK


@every_shape
def test_larger_tiers_keep_more(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(replace(shape, gpu_rows=6, cpu_rows=8))
    steer(replica, lambda s: s.resize(size(replica, 40), size(replica, 50), 10))
    assert rows(replica) == (40, 50)
    for number in range(5):
        replica.answer(prompt(number, 7 * BLOCK), 1)
    replica.forget()
    assert sum(replica.counters.skips.values()) == 0
    for number in range(5):
        assert tiers_of(replica, prompt(number, 7 * BLOCK))["not_cached"] == 0
        assert replica.answer(prompt(number, 7 * BLOCK), 1).cached == 7 * BLOCK - 1
        replica.forget()


def test_a_tier_goes_and_comes_back(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    replica.answer(prompt(1, 5 * BLOCK), 1)
    steer(replica, lambda s: s.resize(0, None, 10))
    assert rows(replica) == (0, 60)
    replica.answer(prompt(2, 5 * BLOCK), 1)
    assert tier_of(replica.manager.index.where(replica.manager.keys()[-1])) is Tier.CPU
    steer(replica, lambda s: s.resize(size(replica, 12), 0, 10))
    assert rows(replica) == (12, 0)
    replica.answer(prompt(3, 5 * BLOCK), 1)
    assert replica.manager.index.gpu.snapshots == 5


def test_a_tier_waits_for_rows_in_use_and_nothing_waits_for_it(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    replica.answer(prompt(1, 5 * BLOCK + 1), 1)
    replica.forget()
    slow = replica.ranks[1].copier.gate
    slow.run = 0
    replica.ask(prompt(1, 5 * BLOCK + 1), 1)  # a load that does not end
    for _ in range(3):
        replica.step()
    answer = steer(replica, lambda s: s.resize(size(replica, 1), None, 0.1))
    assert answer["gpu"]["state"] == "draining"
    assert answer["gpu"]["rows"] == 1
    assert answer["gpu"]["rows_leaving"] >= 4
    with pytest.raises(OptionError, match=r"xavier_gpu_budget=.* while the tier goes to 1 rows"):
        steer(replica, lambda s: s.resize(size(replica, 5), None, 1))
    other = replica.ask(prompt(2, 3 * BLOCK), 3)
    for _ in range(10):
        replica.step()
        check_step(replica)
    assert replica.asked[other].finished is not None, "others are served meanwhile"
    slow.open()
    replica.run()
    finish_changes(replica)
    assert rows(replica) == (1, 60)


def test_a_rank_without_memory_leaves_the_budgets(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(TP2)
    slab = replica.ranks[1].connector._worker._slabs[1]
    real = slab.resize

    def refuse(count: int) -> object:
        task = real(count)
        task.join()
        task.problem = "the system has no memory for it (out of memory)" if count > 60 else None
        return task

    monkeypatch.setattr(slab, "resize", refuse)
    with pytest.raises(OptionError, match=r"stay as they were: .* \(out of memory\)"):
        steer(replica, lambda s: s.resize(None, size(replica, 90), 10))
    assert rows(replica) == (12, 60)
    assert {rank.connector._worker._slabs[1].rows for rank in replica.ranks} == {60}


@pytest.mark.parametrize(
    ("gpu", "cpu", "words"),
    [
        (1, None, ["xavier_gpu_budget=1", "below one row", "Give at least"]),
        (0, 0, ["No tier would be left"]),
        (2**50, None, ["xavier_gpu_budget", "more than this replica can grow to", "Give"]),
        (None, 2**20, ["xavier_cpu_budget=1048576", "bytes more", "Give less"]),
    ],
)
def test_impossible_budgets_are_refused_and_change_nothing(
    make_replica: MakeReplica,
    monkeypatch: pytest.MonkeyPatch,
    gpu: int | None,
    cpu: int | None,
    words: list[str],
) -> None:
    replica = make_replica(TP2)
    monkeypatch.setattr(steering_module, "available_memory", lambda: 4096)
    with pytest.raises(OptionError) as refused:
        steer(replica, lambda s: s.resize(gpu, cpu, 10))
    assert all(word in str(refused.value) for word in words), refused.value
    assert rows(replica) == (12, 60)


def test_a_tier_that_was_off_at_launch_stays_off(make_replica: MakeReplica) -> None:
    replica = make_replica(replace(TP2, cpu_rows=0))
    with pytest.raises(OptionError, match=r"xavier_cpu_budget=.* switched off at launch"):
        steer(replica, lambda s: s.resize(None, size(replica, 5), 10))
    with pytest.raises(OptionError, match="No tier would be left"):
        steer(replica, lambda s: s.resize(0, None, 10))


def test_an_engine_that_takes_no_step_says_so(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(TP2)
    replica.answer(prompt(1, 5 * BLOCK), 1)
    monkeypatch.setattr(steering_module, "COMMAND_SECONDS", 0.05)
    monkeypatch.setattr(replica, "step", lambda: None)
    with pytest.raises(OptionError, match=r"no step for 0\.05 seconds, so nothing was changed"):
        steer(replica, lambda s: s.clear())
    monkeypatch.undo()
    replica.run()
    assert len(replica.manager.index) == 5, "what nobody waits for is not done later"


# -- pause, lookup -----------------------------------------------------------------------------


def test_a_pause_stores_nothing_and_uses_what_is_there(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    replica.answer(prompt(1, 5 * BLOCK + 1), 1)
    assert steer(replica, lambda s: s.pause_stores(True)) == {"paused": True}
    replica.forget()
    assert replica.answer(prompt(1, 5 * BLOCK + 1), 1).cached == 5 * BLOCK
    replica.answer(prompt(2, 5 * BLOCK), 1)
    assert len(replica.manager.index) == 5
    assert replica.counters.skips["paused"] == 5
    assert steer(replica, lambda s: s.pause_stores(False)) == {"paused": False}
    replica.answer(prompt(3, 5 * BLOCK), 1)
    assert len(replica.manager.index) == 10


@every_shape
def test_a_lookup_says_what_a_request_then_finds(make_replica: MakeReplica, shape: Shape) -> None:
    replica = make_replica(shape)
    text = prompt(1, 5 * BLOCK + 2)
    nothing = {"engine": 0, "gpu": 0, "cpu": 0, "peer": 0}
    assert tiers_of(replica, text) == {**nothing, "not_cached": len(text), "prefix": 0}
    replica.answer(text, 1)
    assert tiers_of(replica, text)["engine"] == 5 * BLOCK
    replica.forget()
    found = tiers_of(replica, text)
    assert found["gpu"] + found["cpu"] == found["prefix"] == 5 * BLOCK
    assert found["not_cached"] == 2
    assert steering_of(replica)._find(text, "salt")["not_cached"] == len(text)
    assert tiers_of(replica, [9, *text])["not_cached"] == len(text) + 1
    assert replica.answer(text, 1).cached == found["prefix"]


def test_commands_come_in_their_order(make_replica: MakeReplica, model_config: Path) -> None:
    replica = make_replica(TP2)
    for number in range(3):
        replica.answer(prompt(number, 5 * BLOCK), 1)
    first = begin_resize(replica, gpu=20)
    second = begin(replica, replica.manager.clear)
    third = begin_resize(replica, gpu=2)
    finish_changes(replica)
    assert first.result() is None
    assert second.result() == (15, 0)
    with pytest.raises(OptionError, match="goes to 20 rows"):
        third.result()
    assert rows(replica) == (20, 60)
