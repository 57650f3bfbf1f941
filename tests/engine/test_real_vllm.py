"""Real vLLM on the CPU build: bytes, answers and faults; one rank, a hybrid model, two ranks.

Every loaded block is compared with its checksum from the store, in the KV block it landed in; equal
answers of an fp32 model are the second witness.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 540

Result = dict[str, Any]


def tiny_model() -> ModuleType:
    """The builder in ``examples``, which is no package."""
    path = HERE.parents[1] / "examples" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_alone(command: list[str], log: Path) -> None:
    """Run a command in a session of its own, so that no signal of its workers reaches us."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("XINFERENCE")}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(TIMEOUT_SECONDS)
        finally:  # workers must not outlive a test that failed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, log.read_text()[-8000:]


@pytest.fixture(
    scope="module",
    params=[
        "qwen2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen2-tp2")),
    ],
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What ``real_vllm`` found out, in a process of its own."""
    folder = tmp_path_factory.mktemp("real")
    scenario: str = request.param
    if scenario == "gemma3":
        model = tiny_model().build_gemma3(folder / "model")
    else:
        model = tiny_model().build(folder / "model", size="tiny")
    command = [sys.executable, str(HERE / "real_vllm.py"), scenario, str(model)]
    run_alone([*command, str(folder / "out")], folder / "log")
    found: Result = json.loads((folder / "out").read_text())
    found["scenario"] = scenario
    return found


def test_answers_are_those_of_vllm_without_the_cache(result: Result) -> None:
    plain = result["plain"]
    assert plain["answers"][0] == plain["answers"][1] == plain["answers"][2]
    for engine in ("cached", "faulty"):
        assert result[engine] == plain, engine


def test_every_loaded_block_held_the_stored_bytes(result: Result) -> None:
    assert result["stats"]["counters"]["mismatches"] == 0
    assert result["faulty_stats"]["counters"]["mismatches"] == 0
    if "verified" in result:
        counters = result["stats"]["counters"]
        assert result["verified"] >= counters["hits_gpu_blocks"] + counters["hits_cpu_blocks"]


def test_both_tiers_were_hit_and_snapshots_moved(result: Result) -> None:
    counters = result["stats"]["counters"]
    for name in ("hits_gpu_blocks", "hits_cpu_blocks", "demotions", "promotions"):
        assert counters[name] > 0, name
    assert counters["failed_copies"] == 0


def test_tokens_add_up(result: Result) -> None:
    for name in ("stats", "faulty_stats"):
        counters = result[name]["counters"]
        sources = ("engine", "gpu", "cpu", "computed")
        assert sum(counters[f"tokens_{source}"] for source in sources) == counters["tokens_prompt"]
        for receipt in result[name]["requests"]:
            assert sum(receipt[source] for source in sources) == receipt["prompt"]


def test_the_first_move_and_the_first_load_fail(result: Result) -> None:
    """On one of the ranks: requests were answered, the engine lived, and both were counted."""
    assert result["faulty_stats"]["counters"]["failed_copies"] == 2
    counters = result["faulty_stats"]["counters"]
    assert counters["hits_cpu_blocks"] > 0
    assert counters["demotions"] > 0


def test_nothing_is_left_over(result: Result) -> None:
    for name in ("stats", "faulty_stats"):
        assert result[name]["jobs_in_flight"] == 0
        assert result[name]["pins"] == 0
