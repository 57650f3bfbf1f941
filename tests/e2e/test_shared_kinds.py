"""Replicas that share on two workers, and replicas of two ranks each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from conversation import answer
from server import Xinference, flags, wait_until
from storm import acquainted

pytestmark = pytest.mark.slow

BUDGETS = ("--xavier-gpu-budget", "16MiB", "--xavier-cpu-budget", "64MiB")
ENGINE = {"num_gpu_blocks_override": 136, "xavier_self_check": 1}
BLOCKS = 2000 // 32
HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("two"), {}, HOSTS)
    yield cluster
    assert cluster.stop() == []


@pytest.fixture(scope="module")
def two_core_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    """vLLM's CPU build wants a core per rank to be named."""
    server = Xinference(tmp_path_factory.mktemp("cores"), VLLM_CPU_OMP_THREADS_BIND="0|1")
    yield server
    assert server.stop() == []


def replicas(server: Xinference) -> list[dict[str, Any]]:
    """Nothing while the supervisor, or what it knows of the model, is not there."""
    answered = server.client.get("/v1/xavier/shared").json()
    found: list[dict[str, Any]] = answered.get("replicas", [])
    return found


def launch(server: Xinference, path: Path, **engine: Any) -> None:
    """Two replicas, ready and acquainted."""
    options = ("--replica", "2", "--enable-xavier-gpu", *BUDGETS, *flags({**ENGINE, **engine}))
    launched = server.launch("shared", path, *options)
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("shared")
    wait_until(lambda: acquainted(replicas(server)), 180, server.tail)


def requests(server: Xinference) -> int:
    return sum(replica["stats"]["counters"]["requests"] for replica in replicas(server))


def ask_both(server: Xinference, first: int = 0) -> list[dict[str, Any]]:
    """Each of three prompts once to either replica, in turns; returns their statistics."""
    had = sum(replica["stats"]["counters"]["hits_peer_blocks"] for replica in replicas(server))
    for number in range(first, first + 3):
        answers = []
        for _ in range(2):
            before = requests(server)
            answers.append(answer(server, "shared", number))
            wait_until(lambda b=before: requests(server) > b, 30, server.tail)
        computed, loaded = answers
        assert loaded == computed
    stats = [replica["stats"] for replica in replicas(server)]
    assert sum(each["counters"]["hits_peer_blocks"] for each in stats) - had == 3 * BLOCKS
    for each in stats:
        assert each["sharing"]["fetch_failures"] == {}
        assert each["counters"]["mismatches"] == each["counters"]["failed_copies"] == 0
    return stats


def test_replicas_on_two_workers_share(two_workers: Cluster, tiny_model: Path) -> None:
    launch(two_workers, tiny_model)
    addresses = {str(replica["address"]).rpartition(":")[0] for replica in replicas(two_workers)}
    assert addresses == set(HOSTS)
    ask_both(two_workers)

    two_workers.restart_supervisor()
    wait_until(lambda: acquainted(replicas(two_workers)), 60, two_workers.worker_log.read_text)
    two_workers.wait_ready("shared")
    before = [replica["stats"]["counters"] for replica in replicas(two_workers)]
    ask_both(two_workers, first=3)
    after = [replica["stats"]["counters"] for replica in replicas(two_workers)]
    for now, then in zip(after, before, strict=True):  # the same engines as before
        assert now["requests"] > then["requests"]
    two_workers.terminate("shared")


def test_ranks_read_from_the_same_ranks_of_the_peer(
    two_core_server: Xinference, tiny_model: Path
) -> None:
    launch(two_core_server, tiny_model, tensor_parallel_size=2)
    assert {each["ranks"] for each in ask_both(two_core_server)} == {2}
    two_core_server.terminate("shared")
