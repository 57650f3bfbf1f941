"""Loads that wait for fetches are told once, and what they are told is right."""

from __future__ import annotations

import numpy as np

from xinference_xavier.storage import gates as gates_module
from xinference_xavier.storage.gates import Gates


def test_a_waiter_is_called_once_all_its_fetches_have_ended() -> None:
    gates, called = Gates(), []
    gates.when_settled({1, 2}, lambda: called.append("both"))
    gates.settle(2, frozenset({7}))
    assert called == []
    gates.settle(1, frozenset())
    gates.settle(1, frozenset())
    assert called == ["both"]
    assert gates.lost({1, 2}) == {7}
    gates.when_settled({1}, lambda: called.append("late"))
    assert called == ["both", "late"]


def test_a_failed_fetch_is_lost_whole_and_so_is_one_under_way() -> None:
    gates = Gates()
    gates.settle(1, None)
    assert gates.lost({1}) is None
    assert gates.lost({2}) is None
    assert gates.lost(()) == frozenset()


def test_what_is_forgotten_counts_as_over_and_lost(monkeypatch) -> None:
    monkeypatch.setattr(gates_module, "REMEMBERED", 2)
    gates, called = Gates(), []
    for fetch_id in range(1, 5):
        gates.settle(fetch_id, frozenset())
    gates.when_settled({1}, lambda: called.append(1))
    assert called == [1]
    assert gates.lost({1}) is None
    assert gates.lost({3, 4}) == frozenset()


def test_who_waits_is_told_of_what_has_arrived_and_of_what_arrives() -> None:
    gates, told, ended = Gates(), [], []
    gates.arrive(1, np.array([3, 4]))
    gates.arrive(2, np.array([9]))
    gates.when_settled({1}, lambda: ended.append(1), lambda where: told.append(where.tolist()))
    assert told == [[3, 4]]
    gates.arrive(1, np.array([5]))
    gates.arrive(2, np.array([8]))
    assert told == [[3, 4], [5]]
    gates.settle(1, frozenset({3}))
    gates.arrive(1, np.array([6]))  # late
    assert told == [[3, 4], [5]]
    assert ended == [1]
    assert gates.lost({1}) == {3}


def test_nothing_is_kept_of_what_arrived_once_a_fetch_has_ended() -> None:
    gates, told = Gates(), []
    gates.arrive(1, np.array([3]))
    gates.settle(1, frozenset())
    gates.when_settled({1}, lambda: told.append("end"), lambda where: told.append(where.tolist()))
    assert told == ["end"]
