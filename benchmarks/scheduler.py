"""What the cache costs vLLM's scheduler thread: ``python -m benchmarks.scheduler``.

The real manager with both tiers full, driven as the connector drives it; no model and no copies.
Per key and block: lookups, ``prepare_store``, ``prepare_load``. Per step: 64 requests run, each
with 625 blocks, and fill a block every 16 steps; 64 more wait. vLLM asks of a waiting request's
keys only when it may start, once, and again in each step while one of them is being written: both
are measured apart. CPU time of this process. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence

from tabulate import tabulate
from vllm.v1.kv_offload.base import ReqContext

from benchmarks.own_store import random_keys
from benchmarks.timing import machine, spread
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.messages import RankCapacity, XavierWorkerMetadata
from xinference_xavier.policy.order import order_factory

BLOCK_TOKENS = 16
ROW_BYTES = 2**19


class Engine:
    """The manager of one replica, with full tiers, and the steps that vLLM would make."""

    def __init__(self, entries: int, running: int, prompt_blocks: int, policy: str) -> None:
        gpu, cpu = entries // 5, entries - entries // 5
        self.manager = XavierManager(1, [BLOCK_TOKENS], order_factory(policy))
        self.manager.configure(step_blocks=512)
        self.manager.attach([RankCapacity(gpu, cpu, ROW_BYTES, 2**34, 2**15)])
        self._ids = itertools.count()
        self._stores: list[int] = []
        self._names = itertools.count()
        filler = self.request()
        for _ in range(0, entries + 1024, 512):
            self.store(filler, random_keys(512))
            self.end_step()
            filler = self.request()
        self.running = [self.request() for _ in range(running)]
        self.prompts = [random_keys(prompt_blocks) for _ in self.running]
        for context, keys in zip(self.running, self.prompts, strict=True):
            self.store(context, keys)
            self.end_step()

    def request(self) -> ReqContext:
        context = ReqContext(f"chatcmpl-{next(self._names):032}")
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, keys: Sequence[bytes]) -> int:
        """Offer new blocks; their job's number."""
        output = self.manager.prepare_store(keys, context)
        job = next(self._ids)
        self.manager.ledger.open(job, output.store_spec.plan, context.req_id)
        self._stores.append(job)
        return job

    def end_step(self) -> XavierWorkerMetadata:
        """Plan the step's moves; apply what the worker answers to all of it."""
        moves = self.manager.plan_moves()
        answer = XavierWorkerMetadata(
            completed_jobs=dict.fromkeys(self._stores, 1),
            completed_moves={move.job_id: 1 for move in moves},
        )
        self._stores = []
        self.manager.apply(answer)
        return answer

    def step(self, storing: Sequence[ReqContext], new: Sequence[Sequence[bytes]]) -> None:
        """One step of decoding: some of the running requests have filled a block."""
        for context, keys in zip(storing, new, strict=True):
            self.store(context, keys)
        self.end_step()


def measure(engine: Engine, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, ``rounds`` times."""
    found: dict[str, list[float]] = {}
    manager = engine.manager

    def note(name: str, units: int, work: Callable[..., object], *args: object) -> None:
        gc.collect()
        started = time.process_time()
        work(*args)
        seconds = time.process_time() - started
        found.setdefault(name, []).append(seconds / units * 1e6)

    def look_up(keys: Sequence[bytes], asker: ReqContext) -> None:
        for key in keys:
            manager.lookup(key, asker)

    def store(batches: Sequence[Sequence[bytes]], asker: ReqContext) -> None:
        for keys in batches:
            engine.store(asker, keys)

    def decode(steps: Sequence[tuple[Sequence[ReqContext], Sequence[Sequence[bytes]]]]) -> None:
        for storing, new in steps:
            engine.step(storing, new)

    for at in range(rounds):
        asker, keys = engine.request(), engine.prompts[at % len(engine.prompts)]
        load = manager.prepare_load(keys, asker)  # keeps the prompts among the newest
        manager.planner.finish_load(load.plan)
        note("lookup, hit", 16 * len(keys), look_up, 16 * keys, asker)
        strange = 16 * random_keys(len(keys))
        note("lookup, miss", len(strange), look_up, strange, asker)
        note("prepare_store, of 512", 8 * 512, store, [random_keys(512) for _ in range(8)], asker)
        note("plan_moves and apply, of 512", 8 * 512, engine.end_step)
        parts = [engine.running[number % BLOCK_TOKENS :: BLOCK_TOKENS] for number in range(64)]
        note("a step", 64, decode, [(part, [random_keys(1) for _ in part]) for part in parts])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=64)
    parser.add_argument("--prompt-blocks", type=int, default=625)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--policy", default="lru", help="as xavier_policy")
    args = parser.parse_args(argv)
    print(machine())
    engine = Engine(args.entries, args.running, args.prompt_blocks, args.policy)
    found = measure(engine, args.rounds)
    engine.manager.index.validate()
    rows = [[name, min(times), *spread(times)] for name, times in found.items()]
    heads = ["microseconds of CPU", "least", "lower quartile", "median", "upper quartile"]
    print(tabulate(rows, heads, floatfmt=".2f"), "\n")
    hit = min(found["lookup, hit"])
    result = {
        "entries": args.entries,
        "lookup_hit_us": round(hit, 3),
        "lookup_miss_us": round(min(found["lookup, miss"]), 3),
        "prepare_store_us": round(min(found["prepare_store, of 512"]), 3),
        "schedule_end_us": round(min(found["plan_moves and apply, of 512"]), 3),
        "step_us": round(min(found["a step"]), 1),
        "step_us_median": round(statistics.median(found["a step"]), 1),
        # One waiting request that starts, and all of them asked again in one step.
        "one_starts_us": round(hit * args.prompt_blocks, 1),
        "all_wait_for_writes_us": round(hit * args.prompt_blocks * args.waiting, 1),
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
