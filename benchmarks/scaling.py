"""How cost grows with history, replicas and rows: ``python -m benchmarks.scaling [--plot FILE]``.

History: the index alone, by entries. Replicas: what one published block costs the tracker,
in its directory and in sending, and each mirror, with 2 to 64 replicas. These are the package's own
state machines, and a batch is pickled for each replica; the actors' calls are not in it. Rows: a
store and a demotion by row size. CPU time of one process. Prints tables and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from tabulate import tabulate

from benchmarks import index_alone
from benchmarks.bandwidth import sweep
from benchmarks.own_store import random_keys
from benchmarks.timing import machine
from xinference_xavier.policy.directory import BATCH_KEYS, Batch, Directory, Publisher
from xinference_xavier.policy.fingerprints import FINGERPRINT_BYTES
from xinference_xavier.policy.mirror import Mirror

#: Share of a core that the tracker may take of the supervisor's process.
TRACKER_SHARE = 0.25
#: Blocks that one busy replica stores a second: 32,000 tokens a second in blocks of 16.
BUSY_BLOCKS = 2_000


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    entries = [1_000, 10_000, 50_000, 100_000, 300_000, 1_000_000]
    parser.add_argument("--entries", type=int, nargs="+", default=entries)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--held", type=int, default=50_000, help="blocks that each replica holds")
    parser.add_argument("--batches", type=int, default=64, help="timed batches of one replica")
    rows = [12_288, 49_152, 196_608, 786_432, 3_145_728]
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--row-total", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    return parser.parse_args(argv)


def turned_over(name: str, held: int, batches: int) -> tuple[list[Batch], list[Batch]]:
    """A replica's batches until it holds ``held`` blocks, and ``batches`` more in which every block
    that comes makes one go."""
    publisher, there = Publisher(name), random_keys(held)
    publisher.restart(lambda: there)
    filling = list(iter(publisher.take, None))
    new = random_keys(batches * BATCH_KEYS // 2)
    for old, key in zip(there * (len(new) // held + 1), new, strict=False):
        publisher.note(key, True)
        publisher.note(old, False)
    return filling, list(iter(publisher.take, None))


def cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started


def tracker_cost(replicas: int, held: int, batches: int, rounds: int) -> dict[str, float]:
    """CPU microseconds of one block that is stored for another that is evicted: in the directory,
    in sending it to all other replicas, and in each of their mirrors."""
    directory, mirror = Directory(), Mirror()
    filling, _ = turned_over("filler", held, 1)
    for member in range(replicas - 1):
        for batch in filling:
            named = batch._replace(member=f"member {member}")
            directory.publish("scope", named)
            mirror.apply(named)
    best = {"directory": float("inf"), "send": float("inf"), "mirror": float("inf")}
    for number in range(rounds):
        first, timed = turned_over(f"publisher {number}", held, batches)
        for batch in first:
            assert directory.publish("scope", batch)
            assert mirror.apply(batch)
        blocks = sum(len(batch.added) for batch in timed) / FINGERPRINT_BYTES
        steps: dict[str, Callable[[], object]] = {
            "directory": lambda some=timed: [directory.publish("scope", one) for one in some],
            "send": lambda some=timed: [
                pickle.dumps(one, 5) for one in some for _ in range(replicas - 1)
            ],
            "mirror": lambda some=timed: [mirror.apply(one) for one in some],
        }
        for name, work in steps.items():
            best[name] = min(best[name], cpu_seconds(work) / blocks * 1e6)
        assert directory.snapshot("scope", f"publisher {number}") is not None
        directory.forget(f"publisher {number}")
        mirror.drop(f"publisher {number}")
    tracker = best["directory"] + best["send"]
    return {
        "replicas": replicas,
        "directory_us": best["directory"],
        "send_us": best["send"],
        "tracker_us": tracker,
        "mirror_us": best["mirror"],
        #: Every replica stores so many blocks a second before the tracker takes its share.
        "blocks_s_each": TRACKER_SHARE * 1e6 / tracker / replicas,
        #: What each replica then spends on what the others tell it, of a core.
        "mirror_share": BUSY_BLOCKS * (replicas - 1) * best["mirror"] / 1e6,
    }


def history_cost(entries: int, rounds: int) -> dict[str, float]:
    times = index_alone.measure(entries, min(4096, entries), rounds, "lru")
    return {"entries": entries, **{name: min(values) for name, values in times.items()}}


def enough_for(costs: list[dict[str, float]]) -> float:
    """Busy replicas that one tracker serves: between two measured numbers by proportion."""
    demand = [
        (row["replicas"], row["replicas"] * BUSY_BLOCKS * row["tracker_us"] / 1e6) for row in costs
    ]
    if demand[0][1] >= TRACKER_SHARE:
        return demand[0][0] * TRACKER_SHARE / demand[0][1]
    for (few, low), (many, high) in pairwise(demand):
        if high >= TRACKER_SHARE:
            return few + (many - few) * (TRACKER_SHARE - low) / (high - low)
    return demand[-1][0]


def plot(
    path: Path,
    history: list[dict[str, float]],
    replicas: list[dict[str, float]],
    rows: list[dict[str, float]],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for name, label in (
        ("evict", "one tier: evict"),
        ("scattered", "one tier, victims in random rows"),
        ("demote", "two tiers: demote and evict"),
    ):
        left.semilogx(
            [r["entries"] for r in history], [r[name] for r in history], "o-", label=label
        )
    left.set(xlabel="entries", ylabel="µs of CPU an admitted block", title="Index, by history")
    for name, label in (
        ("tracker_us", "tracker: directory and sending"),
        ("directory_us", "of it the directory"),
        ("mirror_us", "each mirror"),
    ):
        xs = [r["replicas"] for r in replicas]
        middle.plot(xs, [r[name] for r in replicas], "o-", label=label)
    middle.set(
        xlabel="replicas", ylabel="µs of CPU a published block", title="Sharing, by replicas"
    )
    for name, label in (
        ("gather_gb_s", "store"),
        ("demote_gb_s", "demotion"),
        ("memcpy_gb_s", "memcpy"),
    ):
        xs = [r["row_bytes"] / 1024 for r in rows]
        right.semilogx(xs, [r[name] for r in rows], "o-", label=label)
    right.set(xlabel="KiB a row", ylabel="GB/s", title="Copies, by row size")
    for axes in (left, middle, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    print(machine())
    history = [history_cost(entries, args.rounds) for entries in args.entries]
    print(tabulate(history, "keys", floatfmt=".2f"), "\n", flush=True)
    replicas = [
        tracker_cost(count, args.held, args.batches, args.rounds) for count in args.replicas
    ]
    print(tabulate(replicas, "keys", floatfmt=".2f"), "\n", flush=True)
    rows = [sweep(row_bytes, args.row_total, args.rounds) for row_bytes in args.rows]
    print(tabulate(rows, "keys", floatfmt=".2f"), "\n", flush=True)
    if args.plot:
        plot(args.plot, history, replicas, rows)
    result = {
        "history": history,
        "replicas": replicas,
        "rows": rows,
        "busy_replicas_of_one_tracker": round(enough_for(replicas), 1),
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
