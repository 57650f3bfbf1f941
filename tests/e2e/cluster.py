"""A supervisor and workers as separate servers, on addresses and with environments of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server import Xinference, free_port, wait_until


class Cluster(Xinference):
    """Commands of a user's run beside the supervisor, in its environment.

    ``worker`` is added to the workers' environments; ``hosts`` has the address of each.
    """

    def __init__(
        self,
        home: Path,
        worker: dict[str, str],
        hosts: Sequence[str] = ("127.0.0.1",),
        **supervisor: str,
    ) -> None:
        self.worker = worker
        self.hosts = hosts
        self.worker_log = home / f"worker-{hosts[0]}.log"
        super().__init__(home, **supervisor)

    def start(self) -> None:
        """Returns once the workers have registered."""
        api, own = self.url.rpartition(":")[2], str(free_port())
        command = ["xinference-supervisor", "--host", "127.0.0.1", "--port", api]
        self.spawn([*command, "--supervisor-port", own], self.environment, self.log)
        wait_until(self._answers, 180, self.tail)
        environment = {**self.environment, **self.worker}
        for host in self.hosts:
            command = ["xinference-worker", "--endpoint", self.url, "--host", host]
            log = self.home / f"worker-{host}.log"
            self.spawn([*command, "--worker-port", str(free_port())], environment, log)
        wait_until(self._has_workers, 180, self.worker_log.read_text)

    def _has_workers(self) -> bool:
        self._answers()  # raises when a process has ended
        nodes = self.client.get("/v1/cluster/info").json()
        return sum(node["node_type"] == "Worker" for node in nodes) == len(self.hosts)
