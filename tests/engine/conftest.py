"""Replicas of the harness; every one must come to rest with nothing left over."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from checks import check_rest
from harness import MakeReplica, Replica
from shapes import Shape, write_model_config
from sharing_cluster import Cluster, TrackerPool, talk_through_sockets

from xinference_xavier.actors import borrower, fetcher, peers, sharing
from xinference_xavier.actors.bridge import Bridge
from xinference_xavier.engine import connector
from xinference_xavier.engine.settings import SECRET_VARIABLE


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


@pytest.fixture(scope="module")
def no_garbage() -> Iterator[None]:
    """Drop what xoscar leaves in cycles while the module's own warning filters are in force."""
    yield
    gc.collect()


@pytest.fixture
def quick_tracker(no_garbage: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackerPool]:
    """A supervisor, for replicas that beat often and give up soon."""
    talk_through_sockets(monkeypatch)
    monkeypatch.setenv(SECRET_VARIABLE, "ab" * 32)
    monkeypatch.setattr(connector, "Bridge", partial(Bridge, heartbeat_seconds=0.05))
    monkeypatch.setattr(borrower, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(fetcher, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(fetcher, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(fetcher, "LANDED_SECONDS", 0.1)
    monkeypatch.setattr(peers, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(peers, "LONGEST_PAUSE_SECONDS", 0.4)
    monkeypatch.setattr(sharing, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(sharing, "PATIENCE_SECONDS", 2.0)
    pool = TrackerPool()
    yield pool
    pool.stop()


@pytest.fixture
def quick_cluster(make_replica: MakeReplica, quick_tracker: TrackerPool) -> Cluster:
    """Replicas whose faults are over soon."""
    return Cluster(make_replica, quick_tracker)
