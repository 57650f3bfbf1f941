"""Coalescing: the runs are the positions, in order, as two slices each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.storage.rowmap import runs

SIZE = 40


@given(
    st.lists(st.tuples(*[st.integers(0, SIZE - 1)] * 2, st.integers(0, 1)), max_size=30),
    st.booleans(),
)
def test_runs_name_every_position_once_in_order(
    positions: list[tuple[int, int, int]], adjacent: bool
) -> None:
    left, right, pairs = np.array(positions, np.int64).reshape(-1, 3).T
    everything, end = np.arange(SIZE), 0
    for run in runs(left, right, pairs, adjacent=adjacent):
        assert run.start == end < run.stop
        end = run.stop
        assert everything[run.left].tolist() == left[run.start : end].tolist()
        assert everything[run.right].tolist() == right[run.start : end].tolist()
        assert len(set(pairs[run.start : end].tolist())) == 1
        if adjacent:
            assert run.left.step == run.right.step == 1
    assert end == len(positions)


@pytest.mark.parametrize(
    ("left", "right", "strided", "adjacent"),
    [
        (range(50), range(7, 57), 1, 1),
        (range(49, -1, -1), range(50), 1, 50),  # freed blocks come back in descending order
        (range(0, 100, 2), range(50), 1, 50),
        ([1, 2, 3, 7, 8, 9], [0, 1, 2, 3, 4, 5], 2, 2),
    ],
)
def test_regular_positions_take_few_copies(
    left: list[int], right: list[int], strided: int, adjacent: int
) -> None:
    a, b = np.array(left), np.array(right)
    assert len(list(runs(a, b, a * 0, adjacent=False))) == strided
    assert len(list(runs(a, b, a * 0, adjacent=True))) == adjacent
