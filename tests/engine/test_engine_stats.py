"""The numbers a replica shows are those of its index, and can be read while it works."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from harness import MakeReplica
from shapes import BLOCK, HYBRID, TP2
from test_bytes import prompt

from xinference_xavier.engine.settings import EngineSettings
from xinference_xavier.storage.copier import CopyKind


def test_tiers_counters_and_receipts(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    for number in range(6):
        replica.answer(prompt(number, 5 * BLOCK))
    replica.forget()
    replica.answer(prompt(0, 5 * BLOCK))
    stats = replica.connector._stats.collect()
    index, counters = replica.manager.index, replica.counters
    for name, tier in (("gpu", index.gpu), ("cpu", index.cpu)):
        shown = stats["tiers"][name]
        assert shown["rows"] == tier.rows
        assert shown["snapshots"] == tier.snapshots > 0
        assert shown["free"] == tier.free
        assert shown["bytes"] == tier.snapshots * stats["row_bytes"]
        assert shown["tokens"] == tier.snapshots * BLOCK
        assert shown["budget_bytes"] == tier.rows * stats["row_bytes"]
    assert stats["counters"]["demotions"] == counters.demotions > 0
    assert stats["counters"]["requests"] == 7
    assert stats["counters"]["hits_cpu_blocks"] + stats["counters"]["hits_gpu_blocks"] == 5
    assert stats["counters"]["mismatches"] == 0
    assert stats["copies"]["load"]["jobs"] == 2  # one job, on two ranks
    assert stats["copies"]["load"]["nbytes"] == 5 * stats["row_bytes"]
    assert [receipt["prompt"] for receipt in stats["requests"]] == [20] * 7
    assert (stats["ranks"], stats["kv_groups"], stats["block_tokens"]) == (2, 1, BLOCK)
    assert stats["jobs_in_flight"] == 0
    json.dumps(stats)  # goes over the REST API


def test_tokens_count_once_with_several_kv_groups(make_replica: MakeReplica) -> None:
    replica = make_replica(HYBRID)
    replica.answer(prompt(0, 4 * BLOCK))
    stats = replica.connector._stats.collect()
    assert stats["kv_groups"] == 2
    assert stats["tiers"]["gpu"]["tokens"] + stats["tiers"]["cpu"]["tokens"] == 4 * BLOCK


def test_shadowed_rows(make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference_xavier.engine.stats.SHADOW_SECONDS", 0.0)
    replica = make_replica(TP2)
    replica.answer(prompt(0, 3 * BLOCK))
    assert replica.connector._stats.collect()["shadowed_rows"] == 3
    replica.forget()
    assert replica.connector._stats.collect()["shadowed_rows"] == 0


def test_skips_say_why(make_replica: MakeReplica) -> None:
    replica = make_replica(replace(TP2, gpu_rows=0, cpu_rows=4))
    replica.answer(prompt(0, 10 * BLOCK))
    skips = replica.connector._stats.collect()["skips"]
    assert sum(skips.values()) == 6


def test_identity(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    identity = replica.connector._stats.identity()
    assert identity["options"]["enable_xavier_gpu"] is True
    assert set(identity) == {"model_uid", "replica", "options"}


def test_read_by_another_thread_while_it_works(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    stop, errors = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                replica.connector._stats.collect()
            except Exception as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    replica.ranks[1].copier.gate.fail(CopyKind.MOVE)
    for number in range(12):
        replica.answer(prompt(number % 5, 5 * BLOCK), 2)
    stop.set()
    reader.join()
    assert not errors


def test_settings_split_options_from_identity() -> None:
    settings = EngineSettings.from_extra(
        {"xavier": {"enable_xavier_gpu": True, "xavier_gpu_budget": 5, "model_uid": "m"}}
    )
    assert settings.options.xavier_gpu_budget == 5
    assert settings.model_uid == "m"
    assert EngineSettings.from_extra({}).options.enable_xavier_gpu is False
