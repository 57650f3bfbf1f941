"""Load on two replicas while what they share by fails, again and again: no request does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import PROMPTS, Said, answer
from server import Xinference, flags, wait_until
from storm import Faults, Look, ReplicaFaults, acquainted, at_rest, load

# xoscar leaves client connections to the collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
    ),
]

#: Of the load: more than both replicas hold, so that they evict, store and fetch until its end.
LOAD_PROMPTS = 12
NORMAL_SECONDS = 10.0
#: Four prompts of 62 blocks and little else in each replica; whatever a peer has is fetched; a
#: stopped replica's leases end meanwhile.
OPTIONS = (
    *("--xavier-gpu-budget", "8MiB", "--xavier-cpu-budget", "8MiB"),
    *("--xavier-min-fetch", "64", "--xavier-lease-ttl", "1"),
)
ENGINE = {"num_gpu_blocks_override": 136, "xavier_self_check": 1}
BLOCKS = 2000 // 32


@pytest.fixture(scope="module")
def two_core_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    """vLLM's CPU build wants a core per rank to be named."""
    server = Xinference(tmp_path_factory.mktemp("cores"), VLLM_CPU_OMP_THREADS_BIND="0|1")
    yield server
    assert server.stop() == []


def launch(server: Xinference, path: Path, **engine: Any) -> Look:
    """Two replicas, ready and acquainted; returns what asks for the API's view of them."""
    options = ("--replica", "2", "--enable-xavier-gpu", *OPTIONS, *flags({**ENGINE, **engine}))
    launched = server.launch("stormy", path, *options)
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("stormy")

    def look() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = server.client.get("/v1/xavier/stormy").json()["replicas"]
        return found

    wait_until(lambda: acquainted(look()), 180, server.tail)
    return look


def counter(look: Look, name: str) -> int:
    return sum(replica["stats"]["counters"][name] for replica in look())


def weather(server: Xinference, look: Look, requests: int) -> Faults:
    """A load beside faults, and its end: both replicas share again, soon, and hold nothing."""
    faults = Faults(ReplicaFaults(server, look).kinds)
    try:
        answers = load(server, "stormy", faults, requests, LOAD_PROMPTS)
    finally:
        faults.stop()
    assert len(answers) >= requests  # each of the right length, with status 200
    assert counter(look, "hits_peer_blocks") > 0

    number = LOAD_PROMPTS

    def normal() -> bool:
        """What one replica has computed, the other one reads; then nothing is held for it."""
        nonlocal number
        number += 1
        before = counter(look, "hits_peer_blocks")
        for _ in range(2):  # Xinference gives requests to its replicas in turns
            answer(server, "stormy", number)
        found = look()
        return (
            acquainted(found)
            and all(at_rest(replica["stats"]) for replica in found)
            and counter(look, "hits_peer_blocks") - before == BLOCKS
        )

    wait_until(normal, 30, lambda: str([replica["stats"] for replica in look()]))
    took = time.monotonic() - faults.ended
    print(f"{len(answers)} requests, {dict(faults.done)}; normal after {took:.1f} s:")
    for replica in look():
        print(replica["stats"]["counters"], replica["stats"]["sharing"])
    assert took < NORMAL_SECONDS
    assert counter(look, "mismatches") == 0
    return faults


def test_no_request_fails(
    server: Xinference, tiny_model: Path, plain: tuple[dict[str, object], Said]
) -> None:
    look = launch(server, tiny_model)
    weather(server, look, 200)
    # Alone, an fp32 model's output is a witness of its KV cache.
    for number in range(PROMPTS):
        for _ in range(2):
            assert answer(server, "stormy", number) == plain[1].answers[number]
    assert counter(look, "mismatches") == 0
    server.terminate("stormy")


def test_no_request_fails_on_two_ranks(two_core_server: Xinference, tiny_model: Path) -> None:
    look = launch(two_core_server, tiny_model, tensor_parallel_size=2)
    assert weather(two_core_server, look, 60).done["pause_rank"]
    two_core_server.terminate("stormy")
