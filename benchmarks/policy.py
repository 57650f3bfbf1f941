"""What the policy costs: CPU time per admitted block with every tier full, and bytes per entry.

Measures the index and the planner alone, no copies. CPU time of this process, least of several
repeats, so that other load on the machine hardly counts. Run: ``python benchmarks/policy.py``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import tracemalloc

from xinference_xavier.policy.index import SnapshotIndex
from xinference_xavier.policy.planner import Planner, default_low_water

BATCH = 64
GROUP = (0).to_bytes(4, "big")


def random_keys(count: int) -> list[bytes]:
    return [os.urandom(32) + GROUP for _ in range(count)]


def full_planner(gpu_rows: int, cpu_rows: int) -> Planner:
    planner = Planner(SnapshotIndex(gpu_rows, cpu_rows), default_low_water(gpu_rows, BATCH))
    for first in range(0, gpu_rows + cpu_rows + 2 * BATCH, BATCH):
        admit(planner, random_keys(BATCH), first)
    return planner


def admit(planner: Planner, keys: list[bytes], mark: int) -> None:
    """Everything the scheduler thread does for one store job and the moves that follow."""
    planner.commit_store(planner.admit(keys, mark, set()), ok=True)
    for plan in planner.plan_moves():
        planner.commit_move(plan, ok=True)


def admission_us(planner: Planner, blocks: int, repeats: int) -> float:
    best = float("inf")
    for repeat in range(repeats):
        batches = [random_keys(BATCH) for _ in range(blocks // BATCH)]
        gc.collect()
        started = time.process_time()
        for number, keys in enumerate(batches):
            admit(planner, keys, (repeat + 1) << 32 | number)
        best = min(best, time.process_time() - started)
    return best / (len(batches) * BATCH) * 1e6


def entry_bytes(gpu_rows: int, cpu_rows: int) -> float:
    """After the tiers were turned over, when dictionaries have grown to what they need."""
    tracemalloc.start(1)
    planner = full_planner(gpu_rows, cpu_rows)
    for first in range(0, 2 * (gpu_rows + cpu_rows), BATCH):
        admit(planner, random_keys(BATCH), first + (1 << 32))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / len(planner.index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000, 50_000, 1_000_000])
    parser.add_argument("--blocks", type=int, default=4_096)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    for entries in args.entries:
        gpu_rows = entries // 5
        one, two = full_planner(0, entries), full_planner(gpu_rows, entries - gpu_rows)
        result = {
            "entries": entries,
            "evict_us": round(admission_us(one, args.blocks, args.repeats), 2),
            "demote_and_evict_us": round(admission_us(two, args.blocks, args.repeats), 2),
        }
        del one, two
        result["entry_bytes"] = round(entry_bytes(gpu_rows, entries - gpu_rows))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
