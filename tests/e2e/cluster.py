"""A supervisor and a worker as separate servers, each with an environment of its own."""

from __future__ import annotations

from pathlib import Path

from server import Xinference, free_port, wait_until


class Cluster(Xinference):
    """Commands of a user's run beside the supervisor, in its environment."""

    def __init__(self, home: Path, worker: dict[str, str], **supervisor: str) -> None:
        self.worker = worker
        self.worker_log = home / "worker.log"
        super().__init__(home, **supervisor)

    def start(self) -> None:
        """Returns once the worker has registered."""
        api, own = self.url.rpartition(":")[2], str(free_port())
        command = ["xinference-supervisor", "--host", "127.0.0.1", "--port", api]
        self.spawn([*command, "--supervisor-port", own], self.environment, self.log)
        wait_until(self._answers, 180, self.tail)
        command = ["xinference-worker", "--endpoint", self.url, "--host", "127.0.0.1"]
        environment = {**self.environment, **self.worker}
        self.spawn([*command, "--worker-port", str(free_port())], environment, self.worker_log)
        wait_until(self._has_worker, 180, self.worker_log.read_text)

    def _has_worker(self) -> bool:
        self._answers()  # raises when a process has ended
        nodes = self.client.get("/v1/cluster/info").json()
        return any(node["node_type"] == "Worker" for node in nodes)
