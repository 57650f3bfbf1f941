"""What answers: Xinference with two replicas, or the pair that vLLM's own NixlConnector joins.

Covers: starting each with the same model, pool and steps, reading counters, stopping. Every server
is made for one mode run and ends with it. Does not cover what is sent (``workload.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving.client import Target
from benchmarks.serving.measure import total
from examples.demo.client import Client
from examples.demo.server import (
    LAUNCH_SECONDS,
    Server,
    ServerError,
    build_model,
    end_processes,
    engine_flags,
    free_port,
)

MODES = ("plain", "xavier", "small", "nixl", "nixl-calm")
REPLICAS = 2
ROOT = Path(__file__).parents[2]
#: Tokens of one step, and requests in it: given, because Xinference and vLLM's server differ in
#: what they take when nothing is said.
STEP_TOKENS = 2048
RUNNING = 128
ASK_SECONDS = 1.0
#: Answers in a row after which both replicas have loaded: they take turns.
IN_A_ROW = 2 * REPLICAS
COUNTED = ("counters", "copies", "skips", "accounts", "sharing")


@dataclass(frozen=True)
class Setup:
    """Sizes of an engine and its cache, and where servers may write. Budgets are in bytes."""

    folder: Path
    model: Path
    max_model_tokens: int
    pool_blocks: int
    gpu_budget: int
    cpu_budget: int


class Xinference:
    """Two replicas behind a real Xinference."""

    def __init__(self, setup: Setup, mode: str, server: Server) -> None:
        self._setup = setup
        self._mode = mode
        self._server = server
        self._client = Client(server.url, mode, 1, REPLICAS)
        self.target = Target(server.url, mode)

    def launch(self) -> None:
        """Returns when both replicas have loaded and, with the cache, can read from each other."""
        setup = self._setup
        flags = [
            *engine_flags(setup.model, setup.max_model_tokens, setup.pool_blocks),
            *("--replica", str(REPLICAS), "--enable_prefix_caching", "true"),
            *("--max_num_batched_tokens", str(STEP_TOKENS), "--max_num_seqs", str(RUNNING)),
        ]
        if self._mode != "plain":
            flags += ["--enable-xavier-gpu", "--xavier-gpu-budget", str(setup.gpu_budget)]
            flags += ["--xavier-cpu-budget", str(setup.cpu_budget)]
        self._server.launch(self._mode, flags)
        complaint = f"the replicas of {self._mode} have not loaded"
        self._server.wait(self._loaded, LAUNCH_SECONDS, complaint)
        if self._mode != "plain":
            self._server.wait(self._client.has_cache, 60, "the replicas do not share")

    def counters(self) -> dict[str, Any] | None:
        """Counters of both replicas together; None without the cache."""
        if self._mode == "plain":
            return None
        readings = [{name: _numbers(stats[name]) for name in COUNTED} for stats in self._stats()]
        return total(readings)

    def settle(self) -> None:
        """Wait until what was computed has been stored and published."""
        deadline = time.monotonic() + 30
        while self._mode != "plain" and time.monotonic() < deadline:
            if all(stats["jobs_in_flight"] == 0 for stats in self._stats()):
                break
            time.sleep(0.2)
        time.sleep(0.5)

    def schedulers(self) -> list[int]:
        """Processes of the engines' schedulers, by replica."""
        return [replica["pid"] for replica in self._replicas()]

    def _loaded(self) -> bool:
        # Xinference logs a traceback in three processes for each request that comes too early.
        time.sleep(ASK_SECONDS)
        return all(self._client.is_loaded() for _ in range(IN_A_ROW))

    def _replicas(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.target.url}/v1/xavier/{self._mode}", timeout=30)
        replicas: list[dict[str, Any]] = answer.json()["replicas"]
        return replicas

    def _stats(self) -> list[dict[str, Any]]:
        return [replica["stats"] for replica in self._replicas() if replica["stats"]]


class Pair:
    """Two of vLLM's own servers: one computes prompts, the other decodes."""

    def __init__(self, setup: Setup, mode: str) -> None:
        self._setup = setup
        self._calm = mode == "nixl-calm"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._urls: list[str] = []

    def launch(self) -> None:
        """Returns when both answer. Raises ``ServerError`` when one of them has ended."""
        for role in ("prefill", "decode"):
            self._start(role)
        deadline = time.monotonic() + LAUNCH_SECONDS
        while not all(_healthy(url) for url in self._urls):
            ended = any(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() > deadline:
                raise ServerError(f"vLLM's servers do not answer: see {self._setup.folder}")
            time.sleep(0.5)

    @property
    def target(self) -> Target:
        return Target(self._urls[1], "pair", prefill_url=self._urls[0])

    def counters(self) -> None:
        """None: the pair has no such cache."""
        return

    def settle(self) -> None:
        time.sleep(0.5)

    def stop(self) -> None:
        found: list[psutil.Process] = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                found += [*parent.children(recursive=True), parent]
        end_processes(found)
        for process in self._processes:
            process.wait()

    def _start(self, role: str) -> None:
        setup, port = self._setup, free_port()
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        }
        if self._calm:
            transfer["kv_connector"] = "CalmNixlConnector"
            transfer["kv_connector_module_path"] = "benchmarks.serving.calm"
        # The ``vllm`` command needs metadata that the CPU build does not carry.
        module = "vllm.entrypoints.openai.api_server"
        command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", str(setup.model), "--served-model-name", "pair"]
        command += ["--dtype", "float32", "--enforce-eager", "--enable-prefix-caching"]
        command += ["--max-model-len", str(setup.max_model_tokens), "--block-size", "32"]
        command += ["--num-gpu-blocks-override", str(setup.pool_blocks)]
        command += ["--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(RUNNING)]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {
            **os.environ,
            **engine_environment(),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp,sm,self",
        }
        with (setup.folder / f"{role}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        self._urls.append(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def serve(mode: str, setup: Setup) -> Iterator[Xinference | Pair]:
    """A fresh server of ``mode``, loaded; leaving ends all of its processes."""
    setup.folder.mkdir(parents=True, exist_ok=True)
    if mode.startswith("nixl"):
        pair = Pair(setup, mode)
        try:
            pair.launch()
            yield pair
        finally:
            pair.stop()
        return
    with Server(setup.folder, engine_environment()) as server:
        served = Xinference(setup, mode, server)
        served.launch()
        yield served


def engine_environment() -> dict[str, str]:
    """The same for every mode.

    Left to itself vLLM binds each engine of a machine of two cores to the first of them; one
    thread each, bound to none, gives every engine a core. Block hashes must not differ between the
    pair's processes.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "7",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def make_model(folder: Path, size: str) -> Path:
    """Folder of the random model, built once."""
    return build_model(folder, size)


def row_bytes(model: Path, block_tokens: int) -> int:
    """Bytes of one KV block of all layers, in float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * 2 * heads * 4 * block_tokens)


def _numbers(stats: Mapping[str, Any]) -> dict[str, Any]:
    """What of nested statistics can be added up."""
    found: dict[str, Any] = {}
    for key, value in stats.items():
        if isinstance(value, Mapping):
            found[key] = _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = value
    return found


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def check_modes(modes: Sequence[str]) -> None:
    """Raises ``ValueError`` for a mode there is not."""
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"--modes {mode}: choose from {', '.join(MODES)}")
