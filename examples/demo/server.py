"""A real Xinference on loopback with a home folder of its own, and all of its processes.

Covers: starting and stopping the server, launching a model through the real command line. Does
not cover: requests to a launched model (``client.py``). Runs in the demonstration's process; the
server is a session of its own, so that a Ctrl-C reaches only us, and we end it in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

BIN_FOLDER = Path(sys.executable).parent
MODEL_SCRIPT = Path(__file__).parents[1] / "tiny_model.py"
BLOCK_TOKENS = 32
POLL_SECONDS = 0.25
START_SECONDS = 180
#: Loading the model takes some 15 s on an idle machine.
LAUNCH_SECONDS = 300
#: vLLM's engine takes about 5 s to stop.
STOP_SECONDS = 30


class ServerError(Exception):
    """Xinference or the model did not start; the message holds the end of the log."""


class Server:
    """One ``xinference-local``, without authentication, reachable from this machine only.

    Use as a context manager: leaving it ends every process the server started. ``environment``
    adds to and overrides what the server inherits.
    """

    def __init__(self, home: Path, environment: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.log = home / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {
            **os.environ,
            "XINFERENCE_HOME": str(home),
            "XINFERENCE_AUTH_ADVANCED": "0",
            "XINFERENCE_ENABLE_VIRTUAL_ENV": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [BIN_FOLDER / "xinference-local", "--host", "127.0.0.1", "--port", str(self.port)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait(self._answers, START_SECONDS, "Xinference does not answer")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self, model_uid: str, flags: Sequence[str]) -> None:
        """``xinference launch``; returns when the model is registered, not when it has loaded."""
        command = [BIN_FOLDER / "xinference", "launch", "--endpoint", self.url]
        command += ["--model-uid", model_uid, *flags]
        launched = subprocess.run(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LAUNCH_SECONDS,
            check=False,
        )
        if launched.returncode != 0:
            raise ServerError(f"xinference launch failed:\n{launched.stderr or launched.stdout}")

    def terminate(self, model_uid: str) -> None:
        """``xinference terminate``."""
        command = [BIN_FOLDER / "xinference", "terminate", "--endpoint", self.url]
        subprocess.run(
            [*command, "--model-uid", model_uid],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=True,
        )

    def wait(self, ready: Callable[[], bool], timeout_seconds: float, complaint: str) -> None:
        """Ask ``ready`` until it says yes; raises ``ServerError`` when it never will or does."""
        deadline = time.monotonic() + timeout_seconds
        while not self._ask(ready):
            if self._process is None or self._process.poll() is not None:
                raise ServerError(
                    f"Xinference ended by itself{self._status()}.\n{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"{complaint} after {timeout_seconds:.0f} s.\n{self._log_tail()}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End every process of the server; a second Ctrl-C does not interrupt this."""
        with _signals_ignored():
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
                end_processes(self._processes())
                self._process.wait()
                self._process = None

    def _ask(self, ready: Callable[[], bool]) -> bool:
        try:
            return ready()
        except LookupError as error:
            raise ServerError(f"{error}.\n{self._log_tail()}") from None

    def _status(self) -> str:
        return f" with status {self._process.returncode}" if self._process else ""

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/status", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _processes(self) -> list[psutil.Process]:
        """All that carry our home folder in their environment, as vLLM's engine does too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("XINFERENCE_HOME") == str(self.home):
                    found.append(process)
        return found

    def _log_tail(self, lines: int = 25) -> str:
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([*tail, f"(the whole log: {self.log})"])


def engine_flags(model: Path, max_model_tokens: int, pool_blocks: int) -> tuple[str, ...]:
    """Options of ``xinference launch`` for a random model of ``examples/tiny_model.py``.

    ``pool_blocks`` of ``BLOCK_TOKENS`` tokens are the engine's own KV pool.
    """
    return (
        *("--model-name", "qwen2.5-instruct", "--model-engine", "vllm"),
        *("--size-in-billions", "0_5", "--model-format", "pytorch", "--model-path", str(model)),
        *("--n-gpu", "None", "--dtype", "float32", "--enforce_eager", "true"),
        *("--max_model_len", str(max_model_tokens), "--block_size", str(BLOCK_TOKENS)),
        *("--num_gpu_blocks_override", str(pool_blocks)),
        # Without a GPU Xinference would ask vLLM for none; with the cache the plugin corrects that.
        *("--tensor_parallel_size", "1"),
    )


def build_model(folder: Path, size: str = "demo") -> Path:
    """Random model of ``size`` in a folder within ``folder``, built once per version of its script.

    Raises ``ServerError`` with the script's output when it fails.
    """
    version = hashlib.sha256(MODEL_SCRIPT.read_bytes()).hexdigest()[:12]
    name = "model" if size == "demo" else f"model-{size}"
    built = folder / f"{name}-{version}"
    if not built.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(MODEL_SCRIPT), str(built), "--size", size]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerError(f"{MODEL_SCRIPT} failed:\n{done.stderr}")
    return built


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def end_processes(processes: list[psutil.Process]) -> None:
    """End ``processes`` by themselves first, then by force."""
    for action in ("terminate", "kill"):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, action)()
        _, processes = psutil.wait_procs(processes, timeout=5)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in kept:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
