"""The order ``reuse`` and the history of uses that it goes by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_victim_search import CountedColumn

from xinference_xavier.policy.history import COPY, MOST_USES, UseHistory
from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.leases import Leases
from xinference_xavier.policy.order import NO_ROW, order_factory
from xinference_xavier.policy.planner import Planner
from xinference_xavier.policy.reuse import ReuseOrder

ROWS = 6


def keys(start: int, count: int) -> list[bytes]:
    return [i.to_bytes(32, "big") + bytes(4) for i in range(start, start + count)]


def planner_of(gpu_rows: int, cpu_rows: int) -> Planner:
    return Planner(SnapshotIndex(gpu_rows, cpu_rows, ReuseOrder), 0)


def store(planner: Planner, wanted: list[bytes], mark: int) -> None:
    planner.commit_store(planner.admit(wanted, mark, set()), ok=True)
    planner.index.validate()


def test_the_option_names_it():
    assert order_factory("reuse") is ReuseOrder


@given(
    st.lists(
        st.tuples(st.sampled_from(["flip", "touch", "use", "evict", "resize"]), st.integers(0, 9))
    )
)
def test_it_is_its_definition(steps):
    """Against a list of rows with their ages, searched from end to end."""
    order, uses, now = ReuseOrder(ROWS), bytearray(10), 0
    order.attach(uses)
    model: dict[int, tuple[int, int]] = {}  # row: (class, since), in order of arrival
    rows = ROWS

    def class_of(row: int) -> int:
        return min(max(1, uses[row]).bit_length(), 4) - 1

    for step, drawn in steps:
        row = order.victim() if step == "evict" else drawn
        if step == "resize":
            if all(held < drawn for held in model):
                order.resize(drawn)
                rows = drawn
        elif step == "use":
            uses[drawn] = min(uses[drawn] + 3, MOST_USES)
        elif row in model:
            del model[row]
            if step == "touch":
                order.touch(row)
                model[row] = (class_of(row), now)
            else:
                order.discard(row)
        elif step == "flip" and row < rows:
            now += 1
            order.add(row, b"")
            model[row] = (class_of(row), now)
        waiting = sorted(
            model, key=lambda row: (-((now - model[row][1]) >> 2 * model[row][0]), model[row][0])
        )
        best = waiting[0] if waiting else NO_ROW
        assert order.victim() == best
        assert sorted(order) == sorted(model)
        assert next(iter(order), NO_ROW) == best
        assert len(order) == len(model)


def test_a_scan_leaves_what_is_shared():
    planner, shared = planner_of(0, 100), keys(0, 20)
    for mark in range(1, 9):
        store(planner, shared, mark)
    for mark in range(10, 40):
        store(planner, keys(mark * 1000, 30), mark)
    assert all(key in planner.index for key in shared)


def test_what_is_shared_leaves_when_nobody_asks_any_more():
    planner, shared = planner_of(0, 100), keys(0, 20)
    for mark in range(1, 30):
        store(planner, shared, mark)
    for mark in range(30, 330):
        store(planner, keys(mark * 1000, 50), mark)
    assert not any(key in planner.index for key in shared)


def test_one_request_counts_once():
    planner, (key,) = planner_of(0, 4), keys(0, 1)
    store(planner, [key], 1)
    planner.finish_load(planner.pin_for_load([key], 1))
    planner.retire([key], 1)
    planner.plan_moves()
    cpu = planner.index.cpu
    assert cpu.uses[~planner.index.where(key)] == 1
    planner.finish_load(planner.pin_for_load([key], 2))
    assert cpu.uses[~planner.index.where(key)] == 2


def test_counts_move_with_the_snapshot_and_outlive_it():
    planner, (key,) = planner_of(2, 2), keys(0, 1)
    for mark in (1, 2, 3):
        store(planner, [key], mark)
    planner.moves.low_water = 2
    for plan in planner.plan_moves():
        planner.commit_move(plan, ok=True)
    location = planner.index.where(key)
    assert location < 0
    assert planner.index.cpu.uses[~location] == 3
    planner.index.evict(planner.index.cpu, ~location)
    store(planner, [key], 4)
    assert planner.index.gpu.uses[planner.index.where(key)] == 4


def test_what_a_peer_has_read_is_counted_as_it_is_given_back():
    """Piece by piece: the end of a large lease takes no longer than that of a small one."""
    planner, wanted = planner_of(0, 32), keys(0, 6)
    store(planner, wanted, 1)
    leases, cpu = Leases(planner.index), planner.index.cpu
    lease_id = leases.open("peer", 0.0, 10.0)
    leases.extend(lease_id, wanted)
    assert leases.release(lease_id, at_once=False)

    def uses() -> list[int]:
        return sorted(cpu.uses[~planner.index.where(key)] for key in wanted)

    assert uses() == [1] * 6
    assert leases.give_back(4)
    assert uses() == [1, 1, 2, 2, 2, 2]
    assert not leases.give_back(4)
    assert uses() == [2] * 6
    planner.index.validate()


def fetch(planner: Planner, wanted: list[bytes], mark: int) -> None:
    plan = planner.plan_fetch(wanted, mark)
    assert plan is not None
    planner.fetches.commit(plan.fetch_id)
    planner.fetches.release(plan.fetch_id)
    planner.index.validate()


@pytest.mark.parametrize("last", [False, True])
def test_copies_go_first_unless_they_are_the_last(last):
    planner, copies, own = planner_of(0, 40), keys(0, 10), keys(100, 30)
    asked: list[bytes] = []
    planner.index.held_elsewhere = lambda key: not asked.append(key) and not last
    store(planner, own, 1)
    fetch(planner, copies, 2)
    store(planner, keys(200, 10), 3)
    assert [key in planner.index for key in copies] == [last] * 10
    assert sum(key in planner.index for key in own) == (20 if last else 30)
    assert len(asked) == 10  # each copy once


def test_copies_of_a_request_do_not_keep_it_from_storing():
    planner, own = planner_of(0, 40), keys(100, 30)
    planner.index.held_elsewhere = lambda key: True
    store(planner, own, 1)
    fetch(planner, keys(0, 10), 2)
    store(planner, keys(200, 10), 2)
    assert all(key in planner.index for key in [*keys(0, 10), *keys(200, 10)])


def test_without_peers_nothing_counts_as_a_copy():
    planner = planner_of(0, 40)
    fetch(planner, keys(0, 10), 1)
    assert not any(uses & COPY for uses in planner.index.cpu.uses)


@pytest.mark.parametrize("rows", [1_000, 20_000])
def test_a_search_looks_at_one_row_of_each_class(rows):
    order = ReuseOrder(rows)
    order.attach(bytearray(row % 16 for row in range(rows)))
    for row in range(rows):
        order.add(row, b"")
    order._since = ages = CountedColumn(order._since)
    for _ in range(100):
        before = ages.reads
        row = order.victim()
        assert ages.reads - before == 4
        order.discard(row)
    assert len(order) == rows - 100


def test_a_set_that_cycles_is_no_worse_than_lru_and_moves_no_more():
    """One that does not fit at all: under both, every block has left before its turn."""
    moved, hits = {}, {}
    for name in ("lru", "reuse"):
        planner = Planner(SnapshotIndex(20, 60, order_factory(name)), 4)
        hits[name] = 0
        for mark in range(1, 200):
            prompt = keys(mark % 20 * 100, 6)
            found = [key for key in prompt if key in planner.index]
            hits[name] += len(found)
            planner.finish_load(planner.pin_for_load(found, mark))
            store(planner, prompt, mark)
            for plan in planner.plan_moves((mark,)):
                planner.commit_move(plan, ok=True)
        moved[name] = planner.counters.demotions + planner.counters.promotions
    assert hits["reuse"] >= hits["lru"]
    assert moved["reuse"] <= moved["lru"]


def test_history_counts_and_forgets_the_least_used():
    history = UseHistory(100)
    (key, *others) = keys(0, 200_000)
    counts = [history.use(key) for _ in range(20)]
    assert counts == [*range(1, MOST_USES + 1), *[MOST_USES] * 5]
    for other in others:
        history.use(other)
    assert history.use(key) >= MOST_USES - 1
    history.clear()
    assert history.use(key) == 1


def test_history_of_a_large_cache_follows_some_and_tells_of_those_before():
    history = UseHistory(10**6)
    prompt = keys(0, 1000)
    followed = [i for i, key in enumerate(prompt) if history.follows(key)]
    assert 20 < len(followed) < 150
    assert set(history.admit(prompt)) == {1}
    counts = history.admit(prompt)
    assert counts == [2] * (followed[-1] + 1) + [1] * (999 - followed[-1])


def test_history_takes_two_to_four_bytes_a_row():
    for rows in (50_000, 524_288, 10**6):
        assert 2 <= len(UseHistory(rows)._places) * 2 / rows <= 4
