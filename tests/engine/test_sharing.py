"""What one replica has computed is a hit on every other, byte for byte."""

from __future__ import annotations

import pytest
from faults import quiet
from shapes import BLOCK, HYBRID, PP2, TP2, Shape
from sharing_cluster import Cluster, ask, finish
from test_bytes import prompt

from xinference_xavier import swallowed
from xinference_xavier.engine import connector as connector_module
from xinference_xavier.engine.membership import join

pytestmark = quiet

SHAPES = {"tp2": TP2, "pp2": PP2, "hybrid": HYBRID}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
LENGTH = 5 * BLOCK + 1


@every_shape
def test_a_prompt_of_one_is_a_hit_on_the_other(quick_cluster: Cluster, shape: Shape) -> None:
    first, second = quick_cluster.pair(shape)
    ask(first, prompt(1, LENGTH))
    quick_cluster.settle()
    asked = ask(second, prompt(1, LENGTH))
    assert asked.cached == 5 * BLOCK
    totals = second.manager.receipts.totals
    assert (totals.tokens_peer, totals.hits_peer_blocks) == (5 * BLOCK, 5)
    assert second.manager.fetching.fetches == 1
    assert not second.manager.fetching.failures
    # And back, with what the second computed.
    ask(second, prompt(2, LENGTH))
    quick_cluster.settle()
    assert ask(first, prompt(2, LENGTH)).cached == 5 * BLOCK
    assert len(first.manager.leases) == len(second.manager.leases) == 0


@every_shape
def test_many_who_want_one_prefix_share_one_fetch(quick_cluster: Cluster, shape: Shape) -> None:
    first, second = quick_cluster.pair(shape)
    ask(first, prompt(1, LENGTH))
    quick_cluster.settle()
    asked = [second.ask([*prompt(1, LENGTH), number]) for number in range(6)]
    finish(second)
    assert [second.asked[req_id].cached for req_id in asked] == [5 * BLOCK] * 6
    assert second.manager.fetching.fetches == 1


def test_what_goes_wrong_while_joining_or_looking_costs_no_request(
    quick_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = quick_cluster.pair(TP2)
    ask(first, prompt(1, LENGTH))
    quick_cluster.settle()

    def fail(*args: object) -> None:
        raise ValueError("planned")

    with monkeypatch.context() as patch:
        patch.setattr(connector_module, "choose", fail)
        before = swallowed.counts().get("lookup", 0)
        assert ask(second, prompt(1, LENGTH)).cached == 0
        assert second.connector._stats.collect()["swallowed"]["lookup"] == before + 1
    entry, setup = join(second.connector._settings, fail, {}, second.manager)
    assert (entry["scope"], setup) == (None, None)
    assert "planned" in str(entry["problem"])
