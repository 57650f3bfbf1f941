"""Rows per tier from bytes per replica, in a worker."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from xinference_xavier.engine import sizing
from xinference_xavier.engine.sizing import RankBudget, available_memory
from xinference_xavier.types import CapacityError

MIB = 2**20


def budget(gpu: int = 0, cpu: int | str = 0, ranks: int = 1, local: int = 1) -> RankBudget:
    return RankBudget(gpu_bytes=gpu, cpu_bytes=cpu, ranks=ranks, local_replicas=local)  # type: ignore[arg-type]


def test_a_budget_is_split_over_the_ranks() -> None:
    assert budget(gpu=100 * MIB).gpu_rows(MIB) == 100
    assert budget(gpu=100 * MIB, ranks=2).gpu_rows(MIB) == 50
    assert budget(cpu=100 * MIB + 7, ranks=3).cpu_rows(MIB, 0) == 33
    assert budget().gpu_rows(MIB) == budget().cpu_rows(MIB, MIB) == 0  # switched off


@pytest.mark.parametrize("option", ["xavier_gpu_budget", "xavier_cpu_budget"])
def test_a_budget_below_one_row_is_refused_with_the_bytes_it_takes(option: str) -> None:
    small = budget(gpu=2 * MIB - 1, cpu=2 * MIB - 1, ranks=2)
    with pytest.raises(CapacityError) as error:
        small.gpu_rows(MIB) if "gpu" in option else small.cpu_rows(MIB, 0)
    assert option in str(error.value)
    assert str(2 * MIB) in str(error.value)
    assert budget(gpu=2 * MIB, ranks=2).gpu_rows(MIB) == 1


def test_auto_is_twice_the_pool_within_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: 1000 * MIB)
    assert budget(cpu="auto").cpu_rows(MIB, 100 * MIB) == 200
    assert budget(cpu="auto").cpu_rows(MIB, 300 * MIB) == 500
    assert budget(cpu="auto", ranks=2, local=2).cpu_rows(MIB, 300 * MIB) == 125
    assert budget(cpu="auto").cpu_rows(MIB, 0) == 0


def test_available_memory_respects_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = int(psutil.virtual_memory().available)
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)
    assert available_memory() == pytest.approx(machine, rel=0.2)  # no cgroup at all
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory() == 4000
    (tmp_path / "memory.max").write_text("500\n")  # already over it
    assert available_memory() == 0
