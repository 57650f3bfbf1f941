"""What a peer hit costs: two real vLLM engines of one core each, a real tracker, real NIXL.

``python -m benchmarks.sharing [--pairs 30] [--size bench] [--dtype bfloat16]``. For each pair a new
prompt of 4,300 tokens is computed by A (cold), asked of B (peer hit), and asked of B again once its
engine has forgotten it (own tier). Then 50 requests for one prompt at once, and one that arrives
after the first step of a cold prefill. Times are from sending a request to its first token, in
process.
Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 4300
BLOCK_TOKENS = 32
CONVOY = 50
#: The engine's own pool: two longest requests.
POOL_BLOCKS = 300
#: A cold prompt takes three steps, which leave room for another request: without any, vLLM does
#: not look at those that wait.
STEP_TOKENS = 2048
#: A shorter step has computed nothing.
FORWARD_SECONDS = 0.01
CORES = ("0", "1")


def prompt(number: int) -> list[int]:
    """Prompts of different numbers share no prefix."""
    return [10 + (number * 7919 + i * (2 * number + 3)) % 240 for i in range(PROMPT_TOKENS)]


class Engine:
    """One replica in a process of its own; its methods are called by name over a pipe."""

    def __init__(self, replica: int, model: str, dtype: str, tracker: str) -> None:
        from vllm import LLM

        from xinference_xavier.config import XavierOptions
        from xinference_xavier.engine.settings import EngineSettings

        options = XavierOptions(
            enable_xavier_gpu=True, xavier_gpu_budget="300MiB", xavier_cpu_budget="1GiB"
        )
        settings = EngineSettings(options, "bench", replica, tracker)
        self.llm = LLM(
            model=model,
            dtype=dtype,
            block_size=BLOCK_TOKENS,
            max_model_len=4608,
            max_num_batched_tokens=2 * STEP_TOKENS,
            long_prefill_token_threshold=STEP_TOKENS,
            num_gpu_blocks_override=POOL_BLOCKS,
            enforce_eager=True,
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=settings.transfer_config(),
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        self._sent = 0
        #: Steps that computed something.
        self._forwards = 0

    @property
    def _connector(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler.connector

    def _send(self, tokens: list[int]) -> str:
        from vllm import SamplingParams

        self._sent += 1
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        name = f"r{self._sent}"
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def _finish(self, names: set[str]) -> dict[str, float]:
        """Step until all have answered; when each did."""
        ended: dict[str, float] = {}
        while names - ended.keys():
            for output in self._step():
                ended[output.request_id] = time.perf_counter()
        return ended

    def _step(self) -> list[Any]:
        """One step; without work of its own the engine sleeps, as vLLM's EngineCore does."""
        started = time.perf_counter()
        outputs: list[Any] = self.engine.step()
        if time.perf_counter() - started < FORWARD_SECONDS:
            time.sleep(0.001)
        else:
            self._forwards += 1
        return outputs

    def peers(self) -> int:
        return int(self._connector._stats.collect()["sharing"]["peers"])

    def ask(self, tokens: list[int]) -> float:
        """Seconds to the first token."""
        started = time.perf_counter()
        name = self._send(tokens)
        return self._finish({name})[name] - started

    def settle(self) -> None:
        """Let the last store end, and what it stored be published."""
        while self._connector.has_pending_push_work():
            self.engine.step()
        time.sleep(0.1)

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    def convoy(self, tokens: list[int]) -> dict[str, Any]:
        """Many requests for one prompt at once."""
        before = self.stats()
        started = time.perf_counter()
        names = {self._send(tokens) for _ in range(CONVOY)}
        ended = self._finish(names)
        after = self.stats()
        return {
            "seconds": max(ended.values()) - started,
            "fetches": after["sharing"]["fetches"] - before["sharing"]["fetches"],
        }

    def beside_prefill(self, cold: list[int], shared: list[int]) -> dict[str, Any]:
        """A peer hit that arrives while a cold prompt of several steps is computed."""
        first = self._send(cold)
        self._step()
        started, forwards = time.perf_counter(), self._forwards
        second = self._send(shared)
        seconds = self._finish({second})[second] - started
        steps = self._forwards - forwards
        self._finish({first} if self.engine.has_unfinished_requests() else set())
        return {"steps": steps, "seconds": seconds}

    def memcpy(self, nbytes: int) -> float:
        """Seconds in which one thread copies as many bytes: no read of them takes less."""
        import numpy as np

        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        times = []
        for _ in range(9):
            started = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def stats(self) -> dict[str, Any]:
        collected: dict[str, Any] = self._connector._stats.collect()
        return collected


def serve(core: str, replica: int, model: str, dtype: str, tracker: str, pipe: Connection) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=core,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
    )
    engine = Engine(replica, model, dtype, tracker)
    pipe.send("up")
    while (call := pipe.recv()) is not None:
        pipe.send(getattr(engine, call[0])(*call[1:]))
    os._exit(0)


class Replica:
    """The parent's end of one engine."""

    def __init__(self, number: int, model: str, dtype: str, tracker: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (CORES[number], number, model, dtype, tracker, theirs)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()

    def __call__(self, *call: Any) -> Any:
        self.pipe.send(call)
        return self.pipe.recv()


def start_tracker() -> str:
    """A supervisor's pool with a tracker, on a thread; its address."""
    import xoscar as xo

    from xinference_xavier.actors.tracker import get_or_create_tracker

    up: list[str] = []
    ready = threading.Event()

    async def run() -> None:
        pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0)
        await get_or_create_tracker(pool.external_address)
        up.append(pool.external_address)
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    ready.wait(30)
    return up[0]


def measure(first: Replica, second: Replica, pairs: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"cold": [], "peer": [], "own": []}
    for number in range(pairs):
        tokens = prompt(number)
        times["cold"].append(first("ask", tokens))
        first("settle")
        times["peer"].append(second("ask", tokens))
        second("settle")
        second("forget")
        times["own"].append(second("ask", tokens))
        second("forget")
        print(f"{number + 1:>4}", *(f"{times[name][-1]:>9.4f}" for name in times), flush=True)
    tokens, cold = prompt(pairs), prompt(pairs + 1)
    first("ask", tokens)
    first("settle")
    convoy = second("convoy", tokens)
    second("settle")
    tokens = prompt(pairs + 2)
    first("ask", tokens)
    first("settle")
    return {**times, "convoy": convoy, "beside": second("beside_prefill", cold, tokens)}


def summary(found: dict[str, Any], stats: dict[str, Any], memcpy: float) -> dict[str, Any]:
    sharing, loads = stats["sharing"], stats["copies"]["load"]
    medians = {name: statistics.median(found[name]) for name in ("cold", "peer", "own")}
    spread = {
        f"{name}_iqr_ms": [
            round(1000 * cut, 1) for cut in statistics.quantiles(found[name], n=4)[::2]
        ]
        for name in medians
    }
    return {
        "pairs": len(found["cold"]),
        **{f"{name}_p50_ms": round(1000 * value, 1) for name, value in medians.items()},
        **spread,
        "speedup_p50": round(medians["cold"] / medians["peer"], 1),
        "above_own_p50_ms": round(
            1000
            * statistics.median(p - o for p, o in zip(found["peer"], found["own"], strict=True)),
            1,
        ),
        "convoy_requests": CONVOY,
        "convoy_seconds": round(found["convoy"]["seconds"], 3),
        "convoy_fetches": found["convoy"]["fetches"],
        "beside_prefill_steps": found["beside"]["steps"],
        "beside_prefill_seconds": round(found["beside"]["seconds"], 3),
        "fetches": sharing["fetches"],
        "fetch_failures": sharing["fetch_failures"],
        "fetch_ms": round(1000 * sharing["fetch_seconds"] / sharing["fetches"], 1),
        "read_ms": round(1000 * sharing["read_seconds"] / sharing["fetches"], 1),
        "memcpy_ms": round(1000 * memcpy, 1),
        "load_ms": round(1000 * loads["seconds"] / loads["jobs"], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--size", default="demo", help="of the random model (examples/tiny_model)")
    parser.add_argument("--dtype", default="float32")
    chosen = parser.parse_args()
    os.environ.update(PYTHONHASHSEED="7", XINFERENCE_XAVIER_SECRET="ab" * 32)
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        script = Path(__file__).parents[1] / "examples" / "tiny_model.py"
        kind = ("--size", chosen.size, "--dtype", chosen.dtype)
        subprocess.run([sys.executable, script, model, *kind], check=True)
        tracker = start_tracker()
        replicas = [Replica(number, model, chosen.dtype, tracker) for number in range(2)]
        assert [replica.pipe.recv() for replica in replicas] == ["up", "up"]
        while not all(replica("peers") == 1 for replica in replicas):
            time.sleep(0.2)
        print("pair      cold      peer       own  (seconds)")
        found = measure(*replicas, chosen.pairs)
        stats = replicas[1]("stats")
        nbytes = stats["sharing"]["fetched_bytes"] // stats["sharing"]["fetches"]
        result = summary(found, stats, replicas[1]("memcpy", nbytes))
        for replica in replicas:
            replica.pipe.send(None)
            replica.process.join(10)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
