"""The benchmarks run, at sizes that take seconds, and say what they are asked for."""

from __future__ import annotations

import json

import pytest

from benchmarks import scaling, store
from benchmarks.own_store import KVCache, OwnStore
from benchmarks.timing import ratios, spread


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_store_beside_the_in_tree_one(capsys):
    sizes = ["--history", "600", "--quads", "2", "--repeat", "1", "--batch", "16"]
    index = ["--index", "600", "--index-rounds", "2", "--rows", "49152", "--row-total", "800000"]
    store.main([*sizes, *index, "--against", "in-tree"])
    result = last_line(capsys)
    named = {"block_us_50k", "in_tree_block_us_50k", "speedup_50k", "leased_front_ratio"}
    assert named | {"index_us_1m", "victim_visits_max", "entry_bytes"} <= result.keys()
    assert all(result[name] > 0 for name in named)
    assert result["victim_visits_max"] == 1
    assert (result["history"], result["index_entries"]) == (600, 600)
    assert result["verified_blocks"] > 600
    assert [row["row_bytes"] for row in result["rows"]] == [49152]


def test_a_row_that_differs_is_found():
    cache = KVCache(32, 64)
    own = OwnStore(200, cache, 16)
    try:
        own.batch_us(16)
        assert own.verify() == 16
        key = next(iter(own.stored))
        location = own.index.where(key)
        slab = own.gpu if location >= 0 else own.cpu
        slab.view(location if location >= 0 else ~location, 1)[0, 70] ^= 1
        with pytest.raises(AssertionError, match="layer 1"):
            own.verify()
    finally:
        own.close()


@pytest.mark.slow
def test_scaling(capsys, tmp_path):
    sizes = ["--entries", "500", "1000", "--replicas", "2", "4", "--held", "600"]
    few = ["--batches", "2", "--rounds", "2", "--rows", "49152", "--row-total", "400000"]
    scaling.main([*sizes, *few])
    result = last_line(capsys)
    assert [row["replicas"] for row in result["replicas"]] == [2, 4]
    assert all(row["tracker_us"] > 0 for row in result["replicas"])
    assert result["busy_replicas_of_one_tracker"] > 0


def test_ratios_take_two_samples_of_each_round():
    assert ratios([1, 3, 10, 10], [2, 2, 5, 5]) == [1, 2]
    assert spread([1, 2, 3]) == (1.5, 2, 2.5)
