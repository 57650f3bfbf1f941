"""Load on two replicas while what they share by fails, again and again: no request does."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xoscar as xo
from conversation import Said, answer
from server import Xinference, flags, wait_until

from xinference_xavier.actors.tracker import TRACKER_UID

# xoscar leaves client connections to the collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
    ),
]

REQUESTS = 200
PROMPTS = 6
FAULT_SECONDS = 5.0
#: A stopped replica holds the requests that Xinference gives it, for as long.
STOPPED_SECONDS = 2.0
BUDGETS = ("--xavier-gpu-budget", "8MiB", "--xavier-cpu-budget", "32MiB")
ENGINE = flags({"num_gpu_blocks_override": 136, "xavier_self_check": 1})


@pytest.fixture
def replicas(server: Xinference, tiny_model: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What the API says of two replicas that share."""
    launched = server.launch(
        "stormy", tiny_model, "--replica", "2", "--enable-xavier-gpu", *BUDGETS, *ENGINE
    )
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("stormy")

    def look() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = server.client.get("/v1/xavier/stormy").json()["replicas"]
        return found

    wait_until(lambda: acquainted(look()), 120, server.tail)
    yield look
    server.terminate("stormy")


def acquainted(found: list[dict[str, Any]]) -> bool:
    stats = [replica["stats"] for replica in found if not replica["stale"]]
    return len(stats) == 2 and all(each and each["sharing"]["peers"] == 1 for each in stats)


def destroy(uid: str, address: str) -> None:
    async def run() -> None:
        try:
            await xo.destroy_actor(await xo.actor_ref(uid=uid, address=address))
        except xo.ActorNotExist:  # the fault before this one is not over yet
            return

    asyncio.run(run())


class Faults:
    """One after the other, until ``stop``."""

    def __init__(self, replicas: list[dict[str, Any]], supervisor: str) -> None:
        self._replicas = replicas
        self._supervisor = supervisor
        self._random = random.Random(1)
        self._stopped = threading.Event()
        self.done: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        for fault in itertools.cycle((self._pause_engine, self._lose_tracker)):
            if self._stopped.wait(FAULT_SECONDS):
                return
            fault()
            self.done.append(fault.__name__)

    def _pause_engine(self) -> None:
        pid = self._random.choice(self._replicas)["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)

    def _lose_tracker(self) -> None:
        destroy(TRACKER_UID, self._supervisor)


def test_no_request_fails(
    server: Xinference,
    replicas: Callable[[], list[dict[str, Any]]],
    plain: tuple[dict[str, object], Said],
) -> None:
    supervisor = server.client.get("/v1/address").json()
    faults = Faults(replicas(), supervisor)
    order = [number % PROMPTS for number in range(REQUESTS)]
    random.Random(0).shuffle(order)
    try:
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda number: answer(server, "stormy", number), order))
    finally:
        faults.stop()
    assert len(answers) == REQUESTS  # each of the right length, with status 200
    assert {"_pause_engine", "_lose_tracker"} == set(faults.done)

    # What replicas share by comes back, and gives back all it held.
    def quiet() -> bool:
        found = replicas()
        return acquainted(found) and all(at_rest(replica["stats"]) for replica in found)

    wait_until(quiet, 60, lambda: str(replicas()))
    # Alone, an fp32 model's output is a witness of its KV cache.
    for number in range(PROMPTS):
        for _ in range(2):
            assert answer(server, "stormy", number) == plain[1].answers[number]
    stats = [replica["stats"] for replica in replicas()]
    assert sum(each["counters"]["mismatches"] for each in stats) == 0
    assert sum(each["counters"]["hits_peer_blocks"] for each in stats) > 0


def at_rest(stats: dict[str, Any]) -> bool:
    sharing, tiers = stats["sharing"], stats["tiers"].values()
    return stats["jobs_in_flight"] == sharing["leases"] == sharing["quarantined_rows"] == 0 and all(
        tier["free"] + tier["snapshots"] == tier["rows"] for tier in tiers
    )
