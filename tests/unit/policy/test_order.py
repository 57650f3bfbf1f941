"""LRU against an OrderedDict, and the option that names an order."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.policy.order import NO_ROW, LRUOrder, order_factory
from xinference_xavier.types import OptionError

ROWS = 6


@given(st.lists(st.tuples(st.sampled_from(["flip", "touch", "evict"]), st.integers(0, ROWS - 1))))
def test_lru_is_an_ordered_dict(steps):
    order, model = LRUOrder(ROWS), OrderedDict[int, None]()
    for step, drawn in steps:
        row = drawn
        if step == "evict":
            row = order.victim()
            assert row == next(iter(model), NO_ROW)
            if row == NO_ROW:
                continue
        if step == "touch" and row in model:
            order.touch(row)
            model.move_to_end(row)
        elif row in model:
            order.discard(row)
            del model[row]
        elif step == "flip":
            order.add(row, b"key")
            model[row] = None
        assert list(order) == list(model)
        assert len(order) == len(model)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("flip"), st.integers(0, 9)),
            st.tuples(st.just("resize"), st.integers(0, 10)),
        )
    )
)
def test_a_resized_lru_is_an_ordered_dict(steps):
    order, model, rows = LRUOrder(ROWS), OrderedDict[int, None](), ROWS
    for step, drawn in steps:
        if step == "resize":
            if all(row < drawn for row in model):
                order.resize(drawn)
                rows = drawn
        elif drawn < rows:
            if drawn in model:
                order.discard(drawn)
                del model[drawn]
            else:
                order.add(drawn, b"key")
                model[drawn] = None
        assert list(order) == list(model)
        assert len(order) == len(model)
        assert order.victim() == next(iter(model), NO_ROW)


def test_victim_stays_in_the_order():
    order = LRUOrder(3)
    order.add(2, b"")
    order.add(0, b"")
    assert [order.victim(), order.victim(), len(order)] == [2, 2, 2]


def test_order_of_a_tier_without_rows_is_empty():
    order = LRUOrder(0)
    assert (order.victim(), len(order), list(order)) == (NO_ROW, 0, [])


class LatestFirst(LRUOrder):
    """An order that a user could write: the newest goes first."""

    def victim(self) -> int:
        row = self._prev[self._end]
        return row if row != self._end else NO_ROW


def test_names_resolve():
    assert order_factory("lru") is LRUOrder
    assert order_factory(f"{__name__}:LatestFirst") is LatestFirst


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("fifo", "No module named 'fifo'"),
        ("", "Empty module name"),
        (".relative:Order", "relative"),
        ("no_such_module:Order", "no_such_module"),
        ("collections:NoSuchClass", "NoSuchClass"),
        ("collections", "cannot be imported"),
        ("os:sep", "add, discard, touch, victim"),
        ("collections:OrderedDict", "lacks add, discard, touch, victim"),
        ("xinference_xavier.policy.order:order_factory", "is no eviction order"),
    ],
)
def test_bad_names_are_refused(policy, says):
    with pytest.raises(OptionError) as refusal:
        order_factory(policy)
    message = str(refusal.value)
    assert message.startswith(f"xavier_policy={policy!r}")
    assert says in message
    assert "use one of lru, reuse, or module:Class" in message


def test_module_that_breaks_on_import_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_order.py").write_text("raise RuntimeError('half an installation')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match="half an installation"):
        order_factory("broken_order:Order")
