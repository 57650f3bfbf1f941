"""A stand-in for Xinference's supervisor: a bare xoscar pool in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import xoscar as xo

from xinference_xavier.actors.tracker import get_or_create_tracker


class _Busy(ThreadPoolExecutor):
    def submit(self, *_: object, **__: object) -> Future[Any]:  # type: ignore[override]
        return Future()


async def _serve(address: str, up: Connection, tracker: bool) -> None:
    # As the supervisor's process of Xinference 4.1 has it on two cores: no thread is ever free.
    asyncio.get_running_loop().set_default_executor(_Busy())
    pool = await xo.create_actor_pool(address, n_process=0)
    if tracker:
        await get_or_create_tracker(pool.external_address)
    up.send(pool.external_address)
    await pool.join()


def _run_pool(address: str, up: Connection, tracker: bool) -> None:
    asyncio.run(_serve(address, up, tracker))


class PoolProcess:
    """Starts, kills and restarts a pool on one address, with a tracker in it if asked."""

    def __init__(self, tracker: bool = False) -> None:
        self._tracker = tracker
        self._context = multiprocessing.get_context("spawn")
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        receiver, sender = self._context.Pipe(duplex=False)
        self.process = self._context.Process(
            target=_run_pool, args=(self.address, sender, self._tracker), daemon=True
        )
        self.process.start()
        assert receiver.poll(60), "the pool did not start"
        self.address = receiver.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.process.close()
