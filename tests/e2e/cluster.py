"""A supervisor and workers as separate servers, on addresses and with environments of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from server import Xinference, free_port, wait_until


class Cluster(Xinference):
    """Commands of a user's run beside the supervisor, in its environment.

    ``worker`` is added to the workers' environments; ``hosts`` has the address of each, and
    ``inside`` the words before a worker's command, by its address (to run it elsewhere).
    """

    def __init__(
        self,
        home: Path,
        worker: dict[str, str],
        hosts: Sequence[str] = ("127.0.0.1",),
        *,
        supervisor_host: str = "127.0.0.1",
        inside: Mapping[str, Sequence[str]] | None = None,
        **supervisor: str,
    ) -> None:
        self.host = supervisor_host
        self.inside = inside or {}
        self.worker = worker
        self.hosts = hosts
        self.worker_log = home / f"worker-{hosts[0]}.log"
        self.supervisor_port = free_port()
        super().__init__(home, **supervisor)

    def start(self) -> None:
        """Returns once the workers have registered."""
        self._start_supervisor(self.log)
        environment = {**self.environment, **self.worker}
        for host in self.hosts:
            command = ["xinference-worker", "--endpoint", self.url, "--host", host]
            log = self.home / f"worker-{host}.log"
            command += ["--worker-port", str(free_port())]
            self.spawn(command, environment, log, self.inside.get(host, ()))
        wait_until(self._has_workers, 180, self.worker_log.read_text)

    def restart_supervisor(self) -> None:
        """Kill the supervisor and start it on its addresses; returns once it has its workers."""
        process = self.processes.pop(0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        self._start_supervisor(self.home / "restarted.log")
        self.processes.insert(0, self.processes.pop())
        wait_until(self._has_workers, 180, self.worker_log.read_text)

    def _start_supervisor(self, log: Path) -> None:
        command = ["xinference-supervisor", "--host", self.host]
        command += ["--port", self.url.rpartition(":")[2]]
        command += ["--supervisor-port", str(self.supervisor_port)]
        self.spawn(command, self.environment, log)
        wait_until(self._answers, 180, self.tail)

    def _has_workers(self) -> bool:
        self._answers()  # raises when a process has ended
        nodes = self.client.get("/v1/cluster/info").json()
        return sum(node["node_type"] == "Worker" for node in nodes) == len(self.hosts)
