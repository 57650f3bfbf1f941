"""Another replica's rank as a real process with slabs and a transport, driven over a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from xinference_xavier.storage import transport as transports
from xinference_xavier.storage.rank_memory import RankMemory
from xinference_xavier.storage.slab import Slab

#: Forks from a process that has imported torch: 0.1 s a peer instead of 3.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload([transports.__name__])


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process that has not loaded NIXL yet."""
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_answer, args=(there, function, arguments), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()
        process.close()
        here.close()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))


def content(location: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    """What a row holds after ``fill``, uint8 ``[row_bytes]``: another byte string per row."""
    words = np.arange(row_bytes // 8, dtype=np.int64) * 2654435761
    return (words + location * 1000003 + seed * 7919).view(np.uint8)


class Rank:
    """Both slabs of a rank, without its transport."""

    def __init__(self, device_rows: int, host_rows: int, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.device = Slab(device_rows, row_bytes, "cpu") if device_rows else None
        self.host = Slab(host_rows, row_bytes, "cpu") if host_rows else None
        own = [*range(device_rows), *(~row for row in range(host_rows))]
        self.locations = np.array(own, np.int64)

    def row(self, location: int) -> np.ndarray:
        slab, row = (self.device, location) if location >= 0 else (self.host, ~location)
        assert slab is not None
        return slab.view(row, 1)[0].numpy()

    def fill(self, seed: int = 0) -> None:
        for location in self.locations.tolist():
            self.row(location)[:] = content(location, self.row_bytes, seed)

    def clear(self) -> None:
        for location in self.locations.tolist():
            self.row(location)[:] = 0xEE

    def holds(self, targets: np.ndarray, sources: np.ndarray, seed: int = 0) -> bool:
        """Whether the rows hold what ``fill`` wrote to ``sources``, and no other row changed."""
        wanted = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        return all(
            np.array_equal(self.row(at), content(wanted[at], self.row_bytes, seed))
            if at in wanted
            else self.untouched(at)
            for at in self.locations.tolist()
        )

    def untouched(self, location: int) -> bool:
        return bool((self.row(location) == 0xEE).all())

    def close(self) -> None:
        for slab in (self.device, self.host):
            if slab is not None:
                slab.close()


class PeerProcess:
    """Starts the process and speaks for it; ``close`` leaves nothing behind."""

    def __init__(
        self, device_rows: int, host_rows: int, row_bytes: int, tls: str | None = None
    ) -> None:
        self._pipe, there = _CONTEXT.Pipe()
        arguments = (there, device_rows, host_rows, row_bytes, tls)
        self._process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        there.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.memory: RankMemory = self._pipe.recv()

    def ask(self, command: str, *arguments: Any) -> Any:
        self._pipe.send((command, arguments))
        return self._pipe.recv()

    def tell(self, command: str, *arguments: Any) -> None:
        """Like ``ask``; ``answer`` waits for the answer."""
        self._pipe.send((command, arguments))

    def answer(self) -> Any:
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the process, and return when it has stopped."""
        self.signal(signal.SIGSTOP)
        state = ""
        while state not in ("T", "t"):
            with open(f"/proc/{self.pid}/stat") as stat:
                state = stat.read().rpartition(")")[2].split()[0]

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()
        self._process.close()


def _serve(
    pipe: Connection, device_rows: int, host_rows: int, row_bytes: int, tls: str | None
) -> None:
    if tls is not None:
        os.environ["UCX_TLS"] = tls
    rank = Rank(device_rows, host_rows, row_bytes)
    rank.fill()
    transport = transports.Transport(rank.device, rank.host)
    pipe.send(transport.memory())

    def read(memory: RankMemory, sources: np.ndarray, targets: np.ndarray, times: int) -> bool:
        rank.clear()
        transport.connect(memory).result(10)
        for _ in range(times):
            transport.read(memory, sources, targets, 10).done.result()
        return rank.holds(targets, sources)

    commands = {"read": read, "fill": rank.fill, "close": transport.close}
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(commands[command](*arguments))
