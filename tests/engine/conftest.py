"""Replicas of the harness; every one must come to rest with nothing left over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import check_rest
from harness import MakeReplica, Replica
from shapes import Shape, write_model_config


@pytest.fixture(scope="session")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's configuration, which vLLM reads; there are no weights."""
    return write_model_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_replica(model_config: Path) -> Iterator[MakeReplica]:
    """Build replicas; after the test each runs to its end and is checked."""
    replicas: list[Replica] = []

    def make(shape: Shape) -> Replica:
        replicas.append(Replica(shape, model_config))
        return replicas[-1]

    yield make
    try:
        for replica in replicas:
            replica.run()
            check_rest(replica)
    finally:
        for replica in replicas:
            replica.shutdown()
