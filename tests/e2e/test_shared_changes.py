"""Replicas that share come, go and die while the model serves."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conversation import answer
from server import Xinference, flags, wait_until
from storm import acquainted, at_rest

pytestmark = pytest.mark.slow

BUDGETS = ("--xavier-gpu-budget", "16MiB", "--xavier-cpu-budget", "64MiB")
ENGINE = {"num_gpu_blocks_override": 136, "xavier_self_check": 1}
BLOCKS = 2000 // 32

#: Prompts that nobody has asked yet.
fresh = itertools.count(1000)


@pytest.fixture(scope="module")
def shared(server: Xinference, tiny_model: Path) -> Iterator[Xinference]:
    """A server with a model of two replicas that share. Each test leaves two."""
    options = ("--replica", "2", "--enable-xavier-gpu", *BUDGETS, *flags(ENGINE))
    launched = server.launch("changing", tiny_model, *options)
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("changing")
    wait_until(lambda: acquainted(look(server)), 180, server.tail)
    yield server
    server.terminate("changing")


def look(server: Xinference) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/v1/xavier/changing").json()["replicas"]
    return found


def shared_memory() -> int:
    """Entries of /dev/shm but semaphores of process pools, which other programs make too."""
    return sum(not name.startswith("sem.mp-") for name in os.listdir("/dev/shm"))


def peer_blocks(found: list[dict[str, Any]]) -> int:
    """Blocks that replicas have read from others."""
    return sum(each["stats"]["counters"]["hits_peer_blocks"] for each in found)


def share_all(server: Xinference, count: int) -> None:
    """Prompts that one of ``count`` replicas computes, and every other one reads from a peer."""
    wait_until(lambda: acquainted(look(server), count), 60, lambda: str(look(server)))
    before = peer_blocks(look(server))
    for number in (next(fresh), next(fresh)):
        said = set()
        for _ in range(count):  # Xinference gives requests to its replicas in turns
            asked = requests(server)
            said.add(answer(server, "changing", number))
            wait_until(lambda n=asked: requests(server) > n, 30, server.tail)
        assert len(said) == 1
    after = look(server)
    assert peer_blocks(after) - before == 2 * (count - 1) * BLOCKS
    wait_until(
        lambda: all(at_rest(each["stats"]) for each in look(server)),
        30,
        lambda: str(look(server)),
    )
    for each in after:
        counters = each["stats"]["counters"]
        assert counters["mismatches"] == counters["failed_copies"] == 0


def requests(server: Xinference) -> int:
    return sum(each["stats"]["counters"]["requests"] for each in look(server))


@contextmanager
def asking(server: Xinference) -> Iterator[None]:
    """One request after the other meanwhile, none of which may fail."""
    over, failures = threading.Event(), []

    def ask() -> None:
        while not over.is_set():
            try:
                answer(server, "changing", next(fresh))
            except Exception as error:
                failures.append(error)
            over.wait(0.5)  # leaves the cores to the replica that starts

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert failures == []


def test_a_replica_is_added_and_another_removed(shared: Xinference) -> None:
    memory, before = shared_memory(), look(shared)
    processes = len(shared.family())
    with asking(shared):
        added = shared.client.post("/v1/models/changing/replicas", json={}, timeout=240)
        added.raise_for_status()
        wait_until(lambda: acquainted(look(shared), 3), 120, lambda: str(look(shared)))
    assert [each["replica"] for each in look(shared)] == [
        *(each["replica"] for each in before),
        added.json()["replica_id"],
    ]
    share_all(shared, 3)

    gone = before[0]
    removed = shared.client.delete(f"/v1/models/changing/replicas/{gone['replica']}", timeout=120)
    removed.raise_for_status()
    began = time.monotonic()
    wait_until(
        lambda: gone["replica"] not in [each["replica"] for each in look(shared)],
        60,
        lambda: str(look(shared)),
    )
    print(f"listed for {time.monotonic() - began:.1f} s after its removal")
    share_all(shared, 2)
    assert not psutil.pid_exists(gone["pid"])
    wait_until(lambda: len(shared.family()) <= processes, 30, lambda: str(shared.family()))
    wait_until(lambda: shared_memory() <= memory, 30, lambda: str(os.listdir("/dev/shm")))


def test_an_engine_that_was_killed_is_replaced(shared: Xinference) -> None:
    """By Xinference, once a request has found it dead: that one fails, and those until then."""
    memory, before = shared_memory(), look(shared)
    killed, kept = before
    os.kill(killed["pid"], signal.SIGKILL)

    def replaced() -> bool:
        with suppress(httpx.HTTPError):
            answer(shared, "changing", next(fresh))
        found = look(shared)
        pids = {each["replica"]: each["pid"] for each in found}
        return acquainted(found) and pids.get(killed["replica"]) != killed["pid"]

    wait_until(replaced, 180, shared.tail)
    assert kept["pid"] in {each["pid"] for each in look(shared)}
    share_all(shared, 2)
    wait_until(lambda: shared_memory() <= memory, 30, lambda: str(os.listdir("/dev/shm")))
