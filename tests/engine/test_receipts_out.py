"""Receipts leave the engine with a request's first output and with its last.

Every test of the harness ends with ``check_told``, which holds what outputs said against the
manager's own records; here are the values, and what those tests do not do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from faults import quiet
from harness import Asked, MakeReplica
from shapes import BLOCK, TP2, Shape
from sharing_cluster import Cluster, ask
from test_bytes import OVERLAPPED, SHAPES, every_shape, prompt
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from xinference_xavier.engine import compat_receipts
from xinference_xavier.engine.receipts import SOURCES, Receipt
from xinference_xavier.storage.copier import CopyKind

LENGTH = 5 * BLOCK + 1


def told(asked: Asked) -> dict[str, int]:
    """The receipt without sources that gave nothing."""
    return {source: tokens for source, tokens in asked.told[0].items() if tokens}


@every_shape
def test_computed_then_of_the_engine_then_of_a_tier(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    first = replica.answer(prompt(0, LENGTH), 3)
    assert told(first) == {"computed": LENGTH}
    assert sorted(first.told) == [0, 2]
    assert told(replica.answer(prompt(0, LENGTH))) == {"engine": 5 * BLOCK, "computed": 1}
    replica.forget()
    assert told(replica.answer(prompt(0, LENGTH))) == {"gpu": 5 * BLOCK, "computed": 1}


def test_of_the_cpu_tier(make_replica: MakeReplica) -> None:
    replica = make_replica(replace(TP2, gpu_rows=0))
    replica.answer(prompt(0, LENGTH))
    replica.forget()
    assert told(replica.answer(prompt(0, LENGTH))) == {"cpu": 5 * BLOCK, "computed": 1}


@quiet
def test_of_a_peer(quick_cluster: Cluster) -> None:
    first, second = quick_cluster.pair(TP2)
    ask(first, prompt(1, LENGTH))
    quick_cluster.settle()
    assert told(ask(second, prompt(1, LENGTH), 4)) == {"peer": 5 * BLOCK, "computed": 1}


def test_a_failed_load_is_told_as_computed(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    replica.answer(prompt(0, LENGTH))
    replica.forget()
    replica.ranks[1].copier.gate.fail(CopyKind.LOAD, [0])
    assert told(replica.answer(prompt(0, LENGTH), 2)) == {"computed": LENGTH}


@pytest.mark.parametrize("shape", [TP2, OVERLAPPED], ids=["tp2", "overlapped"])
def test_a_prompt_of_several_steps_is_told_with_its_first_token(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(shape)
    asked = replica.answer(prompt(0, 2 * shape.batch_tokens + 3), 3)
    assert sorted(asked.told) == [0, 2]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_an_aborted_request_was_told_with_its_first_output(
    make_replica: MakeReplica, shape: Shape
) -> None:
    """As one that meets a stop string, which vLLM sees outside the engine."""
    replica = make_replica(shape)
    asked = replica.asked[replica.ask(prompt(0, LENGTH), 20)]
    while len(asked.answer) < 3:
        replica.step()
    replica.abort("r0")
    replica.run()
    assert asked.told == {0: dict.fromkeys(SOURCES, 0) | {"computed": LENGTH}}


def test_aborted_before_any_output_nothing_waits(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    replica.ask(prompt(0, 2 * TP2.batch_tokens), 4)
    replica.step()  # a part of its prompt
    assert list(replica.manager.receipts.untold or ()) == ["r0"]
    replica.abort("r0")
    assert not replica.manager.receipts.untold
    replica.run()


def test_switched_off_no_output_tells(make_replica: MakeReplica) -> None:
    replica = make_replica(replace(TP2, options={"xavier_receipts": False}))
    assert replica.answer(prompt(0, LENGTH), 3).told == {}
    assert replica.manager.receipts.totals.tokens_computed == LENGTH  # still counted


def test_a_fault_costs_the_first_output_its_receipt_and_nothing_else(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise AttributeError("planned")

    monkeypatch.setattr(compat_receipts, "_add_receipts", fail)
    replica = make_replica(TP2)
    for number in range(3):
        asked = replica.answer(prompt(number, LENGTH), 3)
        assert sorted(asked.told) == [2]
        asked.told[0] = asked.told[2]  # for the check at the end
    assert caplog.text.count("without receipts") == 2  # the first and the second


def test_parameters_of_another_are_kept() -> None:
    """Of a connector around ours, say."""

    output = EngineCoreOutput("r", [1], kv_transfer_params={"theirs": 1})
    step = {0: EngineCoreOutputs(outputs=[output])}
    compat_receipts._add_receipts(step, {"r": Receipt("r", 1, 0, 0, 0, 0, 1)})
    assert output.kv_transfer_params == {"theirs": 1}
