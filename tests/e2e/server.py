"""A real Xinference on loopback, with a home folder of its own, driven by its command line.

Covers: starting and stopping a server and all its processes, launching, asking. Does not cover:
what the answers mean. Each server process leads a process group, and every process below it
carries the home folder in its environment, by which leftovers are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.25

#: vLLM's arguments for the tiny models.
ENGINE = {"max_model_len": 4096, "enforce_eager": True, "block_size": 32, "dtype": "float32"}

#: A launch of the tiny Qwen2 on a machine without a GPU.
QWEN = ("--model-name", "qwen2.5-instruct", "--size-in-billions", "0_5")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def flags(arguments: dict[str, Any]) -> list[str]:
    """Launch arguments as Xinference's command line takes them."""
    pairs = [(f"--{name}", json.dumps(value).strip('"')) for name, value in arguments.items()]
    return [part for pair in pairs for part in pair]


def wait_until(
    ready: Callable[[], Any],
    timeout_seconds: float,
    what: Callable[[], str],
    poll_seconds: float = POLL_SECONDS,
) -> Any:
    """First true answer of ``ready``; servers say nothing when they become ready, so ask again.

    Raises:
        TimeoutError: with the text of ``what``.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        answer = ready()
        if answer:
            return answer
        time.sleep(poll_seconds)
    raise TimeoutError(what())


class Xinference:
    """One ``xinference-local``. ``client`` carries the token of the first user, if any."""

    host = "127.0.0.1"

    def __init__(self, home: Path, auth: bool = False, **environment: str) -> None:
        self.home = home
        self.log = home / "server.log"
        self.url = f"http://{self.host}:{free_port()}"
        self.token: str | None = None
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "XINFERENCE_HOME": str(home),
            "XINFERENCE_AUTH_ADVANCED": "1" if auth else "0",
            "XINFERENCE_ENABLE_VIRTUAL_ENV": "0",
            "HF_HUB_OFFLINE": "1",
            # Enough for the tiny model, and little enough for the machine.
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **environment,
        }
        self.client = httpx.Client(base_url=self.url, timeout=120)
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            self.start()
            if auth:
                self._log_in()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start the server's processes; returns once it answers."""
        port = self.url.rpartition(":")[2]
        command = ["xinference-local", "--host", "127.0.0.1", "--port", port]
        self.spawn(command, self.environment, self.log)
        wait_until(self._answers, 180, self.tail)

    def spawn(
        self,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        inside: Sequence[str] = (),
    ) -> None:
        """Start one of Xinference's commands; the words of ``inside`` come before it."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*inside, BIN / command[0], *command[1:]],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of a user's; its exit status is the caller's to check."""
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def launch(
        self, model_uid: str, model_path: Path, *options: str, model: tuple[str, ...] = QWEN
    ) -> subprocess.CompletedProcess[str]:
        """``xinference launch`` of a tiny model."""
        command = [BIN / "xinference", "launch", "--endpoint", self.url, "--model-uid", model_uid]
        command += [*model, "--model-engine", "vllm", "--model-format", "pytorch"]
        command += ["--n-gpu", "None", "--model-path", str(model_path), *flags(ENGINE), *options]
        if self.token:
            command += ["--api-key", self.token]
        return self.run(*command)

    def run_example(
        self, name: str, model_uid: str, model_path: Path, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A launch by one of the scripts in ``examples/``, as their texts say."""
        interpreter = sys.executable if name.endswith(".py") else "bash"
        environment = {
            "XINFERENCE_ENDPOINT": self.url,
            "MODEL_UID": model_uid,
            "MODEL_PATH": str(model_path),
            "N_GPU": "None",
            **environment,
        }
        return self.run(interpreter, ROOT / "examples" / name, *arguments, **environment)

    def wait_ready(self, model_uid: str, timeout_seconds: float = 240) -> None:
        """Return once the model answers: Xinference calls it ready before its engine has loaded.

        Raises:
            RuntimeError: its engine did not start, after which Xinference knows no such model.
        """

        def answers() -> bool:
            answer = self.complete(model_uid, "a", max_tokens=1)
            if "not found" in answer.text:
                raise RuntimeError(f"{model_uid} did not load: {self.tail(3000)}")
            return answer.status_code == 200

        # Each answer that it is still loading costs the server some pages of log.
        wait_until(answers, timeout_seconds, self.tail, poll_seconds=1)

    def complete(self, model_uid: str, prompt: str, **fields: Any) -> httpx.Response:
        body = {"model": model_uid, "prompt": prompt, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body)

    def terminate(self, model_uid: str) -> None:
        self.client.delete(f"/v1/models/{model_uid}").raise_for_status()

    def tail(self, lines: int = 60) -> str:
        text = self.log.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def replica(self, model_uid: str) -> dict[str, Any]:
        """What the cache's REST API shows of the model's only replica."""
        answer = self.client.get(f"/v1/xavier/{model_uid}")
        answer.raise_for_status()
        (replica,) = answer.json()["replicas"]
        return replica

    def stats(self, model_uid: str) -> dict[str, Any]:
        """The replica's statistics, once no copy is in flight."""

        def settled() -> dict[str, Any] | None:
            stats: dict[str, Any] = self.replica(model_uid)["stats"]
            return stats if stats["jobs_in_flight"] == 0 else None

        return wait_until(settled, 30, self.tail)

    def stop(self) -> list[str]:
        """Stop everything, last started first; returns what could not be stopped, as text."""
        self.client.close()
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
        left = self.family()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for straggler in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                straggler.kill()
        for process in self.processes:
            process.wait(10)
        psutil.wait_procs(left, timeout=10)
        return [str(process) for process in self.family()]

    def family(self) -> list[psutil.Process]:
        """Living processes with this server's home folder in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.environ().get("XINFERENCE_HOME") == str(self.home)
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _answers(self) -> bool:
        if any(process.poll() is not None for process in self.processes):
            raise RuntimeError(f"the server ended: {self.tail()}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/status", timeout=5).status_code == 200
        return False

    def _log_in(self) -> None:
        """Make the first user with the set-up token from the log."""
        found = wait_until(self._setup_token, 30, self.tail)
        user = {"username": "admin", "password": "Str0ng-pass-word!"}
        answer = httpx.post(
            f"{self.url}/v1/admin/setup", json={**user, "setup_token": found}, timeout=30
        )
        answer.raise_for_status()
        self.token = httpx.post(f"{self.url}/token", json=user, timeout=30).json()["access_token"]
        self.client.headers["Authorization"] = f"Bearer {self.token}"

    def _setup_token(self) -> str | None:
        found = re.search(r"Setup token: (\S+)", self.log.read_text(errors="replace"))
        return found.group(1) if found else None
