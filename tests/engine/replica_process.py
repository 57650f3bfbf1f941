"""A replica of the harness in a process of its own, to be stopped and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shapes import Shape

_CONTEXT = multiprocessing.get_context("spawn")


class ReplicaProcess:
    """Starts the process and speaks for it; ``close`` leaves nothing behind."""

    def __init__(self, shape: Shape, model: Path) -> None:
        self._pipe, there = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(there, shape, model), daemon=True)
        self._process.start()
        there.close()
        self.member: str = self._pipe.recv()

    def answer(self, tokens: Sequence[int]) -> tuple[int, set[bytes]]:
        """Tokens that were cached, and the keys that the replica holds now."""
        self._pipe.send(list(tokens))
        cached, keys = self._pipe.recv()
        return cached, set(keys)

    def leases(self) -> int:
        self._pipe.send(None)
        return int(self._pipe.recv())

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(20)

    close = kill


def _serve(pipe: Connection, shape: Shape, model: Path) -> None:
    from harness import Replica
    from sharing_cluster import ask, member_of, sharing_of, until

    replica = Replica(shape, model)
    until(lambda: sharing_of(replica) is not None, "the bridge to share")
    pipe.send(member_of(replica))
    while True:
        tokens: Any = pipe.recv()
        if tokens is None:
            pipe.send(len(replica.manager.leases))
        else:
            pipe.send((ask(replica, tokens).cached, list(replica.manager.keys())))
