"""The launches that the documentation shows, run as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server import ENGINE, Xinference

#: The scripts read arguments ``name=value``, where a value is JSON.
ARGUMENTS = [f"{name}={json.dumps(value)}" for name, value in ENGINE.items()]
BUDGETS = {"GPU_BUDGET": "16MiB", "CPU_BUDGET": "32MiB"}
SIZES = {"xavier_gpu_budget": 16 * 1024**2, "xavier_cpu_budget": 32 * 1024**2}


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in SIZES}


def test_command_line(server: Xinference, cached_model: str) -> None:
    """The shared model was launched by ``launch_cli.sh``."""
    options = server.replica(cached_model)["options"]
    assert options["enable_xavier_gpu"] is True
    assert (options["xavier_gpu_budget"], options["xavier_cpu_budget"]) == (2**24, 2**26)


@pytest.mark.slow
def test_rest(server: Xinference, tiny_model: Path) -> None:
    done = server.run_example("launch_rest.py", "by-rest", tiny_model, *ARGUMENTS, **BUDGETS)
    assert done.returncode == 0, done.stderr
    (replica,) = json.loads(done.stdout)["replicas"]
    assert chosen(replica["options"]) == SIZES
    server.terminate("by-rest")


@pytest.mark.slow
def test_python_client(server: Xinference, tiny_model: Path) -> None:
    done = server.run_example("launch_python.py", "by-python", tiny_model, *ARGUMENTS, **BUDGETS)
    assert done.returncode == 0, done.stderr
    uid, _, answer = done.stdout.strip().partition(": ")
    assert uid == "by-python"
    assert len(answer) == 16
    assert chosen(server.replica("by-python")["options"]) == SIZES
    server.terminate("by-python")


@pytest.mark.parametrize("script", ["launch_cli.sh", "launch_rest.py", "launch_python.py"])
def test_bad_option_ends_with_the_sentence(
    server: Xinference, tiny_model: Path, script: str
) -> None:
    done = server.run_example(script, "refused", tiny_model, GPU_BUDGET="4 furlongs")
    assert done.returncode != 0
    assert "xavier_gpu_budget='4 furlongs' has the unknown unit 'furlongs'" in done.stderr
