"""Every copier meets the same contract: ``make_rig`` builds one of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rig import Rig

KINDS = ["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def make_rig(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    """Build rigs of one kind; closed, and checked for threads left over, after the test."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rigs: list[Rig] = []

    def make(layout: str = "uniform", **options: Any) -> Rig:
        rigs.append(Rig(request.param, layout, **options))
        return rigs[-1]

    yield make
    for rig in rigs:  # each close looks for threads of any copier
        rig.copier.close()
    for rig in rigs:
        rig.close()
