"""Faults in what replicas share by, injected one after the other beside a load.

Covers: faults that leave every engine alive. Does not cover an engine's death, whose requests
Xinference itself fails, and faults within one process (``tests/engine``).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import xoscar as xo
from conversation import answer
from server import Xinference

from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.actors.tracker import TRACKER_UID

FAULT_SECONDS = 5.0
#: A stopped replica holds the requests that Xinference gives it, for as long. Longer than leases of
#: the test, and than replicas wait for one's answer.
STOPPED_SECONDS = 2.5
#: Longer than a replica waits for its heartbeat's answer.
SUPERVISOR_SECONDS = 6.0
#: How often each fault happens at least.
ROUNDS = 2

Look = Callable[[], list[dict[str, Any]]]


class Faults:
    """Faults of some ``kinds``, in turns, on a thread of their own, until ``stop``.

    ``done`` counts them by name; ``ended`` is the monotonic time at which the last one was over.
    """

    def __init__(self, kinds: Sequence[Callable[[], None]]) -> None:
        self._kinds = kinds
        self.done: Counter[str] = Counter()
        self.ended = 0.0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def enough(self) -> bool:
        """Each fault happened ``ROUNDS`` times."""
        return all(self.done[kind.__name__] >= ROUNDS for kind in self._kinds)

    def stop(self) -> None:
        """End after the fault under way. Raises what went wrong with injecting."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            for fault in itertools.cycle(self._kinds):
                if self._stop.wait(FAULT_SECONDS):
                    return
                fault()
                self.done[fault.__name__] += 1
                self.ended = time.monotonic()
        except BaseException as error:
            self.error = error


class ReplicaFaults:
    """What may happen to replicas that share, ``kinds``, without an engine's death."""

    def __init__(self, server: Xinference, look: Look) -> None:
        self._look = look
        self._supervisor: str = server.client.get("/v1/address").json()
        self._supervisor_process = _listener(server, self._supervisor)
        self._engines = [psutil.Process(replica["pid"]) for replica in look()]
        self._random = random.Random(1)
        self.kinds = [
            self.pause_engine,
            self.lose_tracker,
            self.lose_replica_actor,
            self.pause_supervisor,
            # With one rank per replica vLLM may run it within the engine's process.
            *((self.pause_rank,) if all(map(_ranks, self._engines)) else ()),
        ]

    def pause_engine(self) -> None:
        _pause([self._random.choice(self._engines)], STOPPED_SECONDS)

    def pause_rank(self) -> None:
        ranks = _ranks(self._random.choice(self._engines))
        _pause([self._random.choice(ranks)], STOPPED_SECONDS)

    def pause_supervisor(self) -> None:
        _pause([self._supervisor_process], SUPERVISOR_SECONDS)

    def lose_tracker(self) -> None:
        destroy(TRACKER_UID, self._supervisor)

    def lose_replica_actor(self) -> None:
        destroy(REPLICA_UID, self._random.choice(self._look())["address"])


def load(
    server: Xinference, model_uid: str, faults: Faults, requests: int, prompts: int
) -> list[str]:
    """Answers to at least ``requests`` requests of four clients, until there were faults enough.

    Raises for the first answer that is not one of status 200 and the right length.
    """
    numbers = random.Random(0)

    def draw() -> Iterator[int]:
        count = 0
        while faults.error is None and (count < requests or not faults.enough):
            yield numbers.randrange(prompts)
            count += 1

    drawn, lock = draw(), threading.Lock()

    def client(_: int) -> list[str]:
        said = []
        while True:
            with lock:
                number = next(drawn, None)
            if number is None:
                return said
            said.append(answer(server, model_uid, number))

    with ThreadPoolExecutor(4) as clients:
        return list(itertools.chain.from_iterable(clients.map(client, range(4))))


def acquainted(found: Sequence[dict[str, Any]], count: int = 2) -> bool:
    """Whether ``count`` replicas answer, and each can read from all others."""
    stats = [replica["stats"] for replica in found if not replica["stale"]]
    return len(stats) == len(found) == count and all(
        each and each["sharing"]["peers"] == count - 1 for each in stats
    )


def at_rest(stats: dict[str, Any]) -> bool:
    """Whether nothing is under way or held, and every row is free or a snapshot."""
    sharing, tiers = stats["sharing"], stats["tiers"].values()
    held = ("leases", "leased_rows", "quarantined_rows")
    return stats["jobs_in_flight"] == 0 == sum(sharing[name] for name in held) and all(
        tier["free"] + tier["snapshots"] == tier["rows"] for tier in tiers
    )


def destroy(uid: str, address: str) -> None:
    """Destroy an actor, unless an earlier fault has."""

    async def run() -> None:
        try:
            await xo.destroy_actor(await xo.actor_ref(uid=uid, address=address))
        except xo.ActorNotExist:
            return

    asyncio.run(run())


def _ranks(engine: psutil.Process) -> list[psutil.Process]:
    """The workers of an engine, where these are processes of their own."""
    children = engine.children(recursive=True)
    return [child for child in children if "Worker" in " ".join(child.cmdline())]


def _pause(processes: Sequence[psutil.Process], seconds: float) -> None:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _listener(server: Xinference, address: str) -> psutil.Process:
    """The server's process that listens at ``address``."""
    port = int(address.rpartition(":")[2])
    for process in server.family():
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return process
    raise AssertionError(f"no process of {os.getpid()}'s server listens at {address}")
