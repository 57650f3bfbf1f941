"""The benchmark of copies runs: on the CPU its own logic, on a GPU all of it."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu_store import KINDS, main


def figures(capsys: pytest.CaptureFixture[str], device: str) -> dict:
    main(["--shape", "small", "--rows", "8", "--rounds", "2", "--device", device])
    found: dict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["row_bytes"] == 12 * 1024
    for kind in KINDS:
        for order in ("one_run", "scattered"):
            assert found[f"{kind}_{order}"]["gb_per_s"] > 0
            assert found[f"{kind}_{order}"]["share"] > 0
    assert found["page_by_page"]["gb_per_s"] > 0
    return found


def test_every_kind_of_copy_is_measured_and_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert "steps" not in figures(capsys, "cpu")


@pytest.mark.gpu
def test_the_store_path_neither_waits_nor_allocates(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = figures(capsys, "cuda")
    for order in ("one_run", "scattered"):
        assert found[f"store_path_{order}"]["waiting_calls"] == 0
        assert found[f"store_path_{order}"]["allocations"] == 0


def test_a_missing_device_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit):
        main([])
    assert "--device cpu" in capsys.readouterr().err
