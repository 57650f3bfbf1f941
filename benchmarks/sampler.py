"""What the API process spends on watching the caches: time per sample, and bytes per point.

The replicas are real managers behind real actors, in one other process, with full lists of recent
requests and counters that grow. Run: ``python -m benchmarks.sampler --replicas 8``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
import tracemalloc
from multiprocessing.connection import Connection
from typing import Any

import xoscar as xo

from xinference_xavier.actors.replica import REPLICA_UID, ReplicaActor
from xinference_xavier.actors.tracker import get_or_create_tracker
from xinference_xavier.host.exporter import Exporter
from xinference_xavier.host.history import MOST_POINTS, Past, Sample
from xinference_xavier.host.sampler import Sampler
from xinference_xavier.host.view import ClusterView


def real_stats() -> Any:
    """A manager's own statistics, as a callable; each call counts one more request."""
    from xinference_xavier.engine.manager import XavierManager
    from xinference_xavier.engine.messages import RankCapacity
    from xinference_xavier.engine.settings import EngineSettings
    from xinference_xavier.engine.stats import Stats
    from xinference_xavier.policy.order import LRUOrder

    manager = XavierManager(2, [16], LRUOrder)
    manager.attach([RankCapacity(1000, 8000, 2**19, 2**30, 2048)] * 2)
    stats = Stats(manager, EngineSettings.from_extra({"xavier": {"enable_xavier_gpu": True}}))
    asked = 0

    def collect() -> dict[str, Any]:
        nonlocal asked
        for _ in range(64 if not asked else 1):
            asked += 1
            state = manager.state_of(f"chatcmpl-{asked:032}")
            state.prompt = 4096
            manager.receipts.count(f"chatcmpl-{asked:032}", state)
            manager.on_request_finished(type("Context", (), {"req_id": f"chatcmpl-{asked:032}"}))
        manager.planner.counters.demotions += 3
        return stats.collect()

    return collect


async def _serve(replicas: int, up: Connection) -> None:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0)
    tracker = await get_or_create_tracker(pool.external_address)
    for number in range(replicas):
        own = await xo.create_actor_pool("127.0.0.1:0", n_process=0)
        address = own.external_address
        await xo.create_actor(ReplicaActor, real_stats(), uid=REPLICA_UID, address=address)
        identity = {"model_uid": "m", "replica": number, "state": "running", "pid": 1}
        rest = {"started": 1.0, "options": {}, "stats": None, "share": None}
        await tracker.heartbeat({**identity, **rest, "address": address})
    up.send(pool.external_address)
    while True:
        entries = await tracker.replicas()
        for entry in entries:
            entry.pop("heartbeat_age_seconds")
            await tracker.heartbeat(entry)
        await asyncio.sleep(2)


def _run(replicas: int, up: Connection) -> None:
    asyncio.run(_serve(replicas, up))


async def measure(supervisor: str, samples: int) -> dict[str, float]:
    """Poll in a row; wall and CPU milliseconds per sample, of this process."""

    async def known_models() -> dict[str, str | None]:
        return {}

    sampler = Sampler(ClusterView(supervisor, known_models))
    exporter = Exporter(sampler)
    for _ in range(5):
        await sampler.poll()
    found = {}
    for name, start in (("sample", lambda: None), ("sample_and_metrics", exporter.start)):
        start()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(samples):
            await sampler.poll()
        found[f"{name}_wall_ms"] = 1000 * (time.perf_counter() - wall) / samples
        found[f"{name}_cpu_ms"] = 1000 * (time.process_time() - cpu) / samples
    assert sampler.latest is not None
    model = sampler.latest.models[0]
    assert all(not replica.stale for replica in model.replicas), "a replica did not answer"
    past = Past()
    past.add(Sample(0.0, 0.0, [model]), model)
    tracemalloc.start(1)
    for number in range(MOST_POINTS - 1):
        past.add(Sample(number, number, [model]), model)
    found["history_kib"] = tracemalloc.get_traced_memory()[0] / 1024
    tracemalloc.stop()
    found["bytes_per_point"] = 1024 * found["history_kib"] / len(past.points)
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--samples", type=int, default=100)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(arguments.replicas, sender), daemon=True)
    child.start()
    try:
        supervisor = receiver.recv()
        print(json.dumps(asyncio.run(measure(supervisor, arguments.samples)), indent=2))
    finally:
        child.kill()
        child.join()


if __name__ == "__main__":
    main()
