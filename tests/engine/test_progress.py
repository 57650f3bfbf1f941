"""Requests always get on: none that holds KV blocks stays behind one that finds none."""

from __future__ import annotations

import pytest
from harness import MakeReplica
from shapes import BLOCK, PP2, TP2, Shape
from test_bytes import OVERLAPPED, prompt

from xinference_xavier.storage.copier import CopyKind


@pytest.mark.parametrize("shape", [TP2, PP2, OVERLAPPED], ids=["tp2", "pp2", "overlapped"])
@pytest.mark.parametrize("failing", [False, True], ids=["loaded", "load failed"])
def test_a_loaded_request_behind_one_without_blocks(
    make_replica: MakeReplica, shape: Shape, failing: bool
) -> None:
    """The first waits for a store in flight, the second loads; then the first does not fit."""
    replica = make_replica(shape)
    replica.answer(prompt(1, 10 * BLOCK))
    late = replica.ranks[1].copier.gate
    late.report = 0
    replica.ask(prompt(0, 2 * BLOCK))
    for _ in range(6):
        replica.step()
    replica.forget()
    large = replica.ask([*prompt(0, 2 * BLOCK), *prompt(2, 13 * BLOCK + 1)])
    replica.step()
    loaded = replica.ask([*prompt(1, 10 * BLOCK), *prompt(3, 3 * BLOCK)])
    if failing:
        late.fail(CopyKind.LOAD, [1])
    for _ in range(4):
        replica.step()
    assert replica.asked[large].cached is None
    assert replica.asked[loaded].cached is None
    late.open()
    replica.run(limit=60)
    assert replica.asked[large].finished == replica.asked[loaded].finished == "length"
    assert replica.asked[loaded].cached == (BLOCK if failing else 10 * BLOCK)
