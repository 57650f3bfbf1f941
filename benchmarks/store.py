"""The store alone, on CPU tensors: ``python -m benchmarks.store [--against in-tree]``.

Blocks of 24 layer tensors, 12 KiB in all, are stored with both tiers full: gather, demotion and
eviction included, bytes verified afterwards. By length of history, in batches and one by one,
without leases and with 64 at the front of both orders. ``--against in-tree`` runs Xinference's own
``TieredKVSnapshotStore`` on the same inputs in turns, A B B A. Then lookups, leases, the CPU tier
alone, the index alone, and rows of real sizes in GB/s beside a memcpy. Prints tables and, last, one
JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from benchmarks import index_alone
from benchmarks.bandwidth import sweep
from benchmarks.own_store import LAYERS, KVCache, OwnStore
from benchmarks.timing import alternate, available_bytes, machine, ratios, spread

BLOCK_BYTES = 12 * 1024
LEASES = 64
#: The history that the targets name.
NAMED = 50_000
#: Entries whose memory is traced, which makes all slow. The share of an entry does not change
#: from there on: the index is made of many parts of one size.
ENTRIES_TRACED = 200_000
#: Bytes that the in-tree store takes for an entry beside its content: 24 tensors and their names.
IN_TREE_ENTRY = 20_000


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    histories = [1_000, 10_000, NAMED, 100_000, 1_000_000]
    parser.add_argument("--history", type=int, nargs="+", default=histories, help="blocks")
    parser.add_argument("--against", choices=["in-tree"], help="what to compare with")
    parser.add_argument("--batch", type=int, default=64, help="blocks stored together")
    parser.add_argument("--repeat", type=int, default=8, help="batches of each sample")
    parser.add_argument("--quads", type=int, default=15, help="A B B A rounds of each comparison")
    parser.add_argument(
        "--in-tree-most", type=int, default=100_000, help="longest of its histories"
    )
    parser.add_argument("--index", type=int, nargs="+", default=[1_000, NAMED, 1_000_000])
    parser.add_argument("--index-rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="*", default=[589_824, 2_097_120, 4_718_592])
    parser.add_argument("--row-total", type=int, default=128 << 20, help="bytes of each copy")
    parser.add_argument("--policy", default="lru", help="as xavier_policy, for our store")
    return parser.parse_args(argv)


class Stores:
    """All that is timed at one length of history: without leases, with them, and the in-tree
    store's same two."""

    def __init__(self, history: int, args: argparse.Namespace) -> None:
        self.args, self.history = args, history
        layer_bytes = BLOCK_BYTES // LAYERS
        # Two of ours; where memory is short, with smaller blocks (the table says so).
        while layer_bytes > 8 and 2 * history * layer_bytes * LAYERS > available_bytes() * 0.6:
            layer_bytes //= 2
        self.block_bytes = layer_bytes * LAYERS
        self.cache = KVCache(4 * args.batch, layer_bytes)
        self.leases_each = min(16, max(1, history // (4 * LEASES)))
        self.plain = OwnStore(history, self.cache, args.batch, policy=args.policy)
        self.leased = OwnStore(history, self.cache, args.batch, policy=args.policy)
        self.leased.lease_oldest(LEASES, self.leases_each)
        self.verified = 0

    def rows(self) -> list[dict[str, Any]]:
        """One result for each way to store."""
        results = []
        for single in (False, True):
            plain, leased = self._pair(self.plain, self.leased, single)
            share = spread(ratios(leased, plain))
            for leases, times in ((0, plain), (LEASES, leased)):
                results.append(self._row("own", single, leases, times))
            results[-1]["front_ratio"] = share
        self.verified += self.plain.verify() + self.leased.verify()
        if self.args.against and self.history <= self.args.in_tree_most:
            results += self._in_tree()
        return results

    def _in_tree(self) -> list[dict[str, Any]]:
        from benchmarks.in_tree import InTreeStore

        results = []
        for own, leases in ((self.plain, 0), (self.leased, LEASES)):
            needed = self.history * (self.block_bytes + IN_TREE_ENTRY)
            if needed > available_bytes() * 0.9:
                print(f"in-tree at {self.history}: needs {needed / 2**30:.0f} GiB, left out")
                break
            other = InTreeStore(self.history, self.cache, self.args.batch)
            if leases:
                other.lease_oldest(leases, self.leases_each)
            for single in (False, True):
                times, ours = self._pair(other, own, single)
                results.append(self._row("in-tree", single, leases, times))
                results[-1]["speedup"] = spread(ratios(times, ours))
                results[-1]["own_beside"] = spread(ours)[1]
            self.verified += other.verify() + own.verify()
            other.close()
            del other
            gc.collect()
        return results

    def _pair(self, a: Any, b: Any, single: bool) -> tuple[list[float], list[float]]:
        def timed(store: Any) -> Callable[[], float]:
            def several() -> float:  # the first ones find the caches full of the other store
                times = [store.batch_us(self.args.batch, single) for _ in range(repeats)]
                return statistics.mean(times)

            return several

        repeats = 1 if single else self.args.repeat

        timed(a)(), timed(b)()
        return alternate(timed(a), timed(b), self.args.quads)

    def _row(self, store: str, single: bool, leases: int, times: list[float]) -> dict[str, Any]:
        low, middle, high = spread(times)
        return {
            "history": self.history,
            "store": store,
            "stored": "one by one" if single else f"{self.args.batch} together",
            "leases": leases,
            "least": min(times),
            "us": middle,
            "quartiles": (low, high),
            "block_bytes": self.block_bytes,
        }

    def calls(self) -> dict[str, float]:
        """Lookups, and lease and release, in microseconds each; the CPU tier alone."""
        host = OwnStore(
            self.history, self.cache, self.args.batch, gpu_share=0, policy=self.args.policy
        )
        times = [host.batch_us(self.args.batch) for _ in range(2 * self.args.quads)]
        self.verified += host.verify()
        host.close()
        count = min(10_000, self.history)
        return {
            "history": self.history,
            "host_tier_us": min(times),
            "hit_us": min(self.plain.lookup_us(count, True) for _ in range(5)),
            "miss_us": min(self.plain.lookup_us(count, False) for _ in range(5)),
            "lease_release_us": min(self.plain.lease_us(64, 50) for _ in range(5)),
        }

    def close(self) -> None:
        self.plain.close()
        self.leased.close()


def between(values: tuple[float, float, float] | None) -> str:
    """A ratio with its quartiles."""
    return "" if values is None else f"{values[1]:.2f} ({values[0]:.2f} to {values[2]:.2f})"


def measure_stores(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    rows: list[dict[str, Any]] = []
    calls, verified = [], 0
    for history in args.history:
        stores = Stores(history, args)
        rows += stores.rows()
        calls.append(stores.calls())
        verified += stores.verified
        stores.close()
        del stores
        gc.collect()
    table = [
        [
            *(row["history"], row["block_bytes"], row["store"], row["stored"], row["leases"]),
            f"{row['us']:.1f} ({row['quartiles'][0]:.1f} to {row['quartiles'][1]:.1f})",
            f"{row['least']:.1f}",
            between(row.get("front_ratio")),
            between(row.get("speedup")),
        ]
        for row in rows
    ]
    heads = ["history", "bytes", "store", "stored", "leases", "us a block", "least"]
    print(tabulate(table, [*heads, "with over without leases", "in-tree over own"]), "\n")
    print(tabulate(calls, "keys", floatfmt=".2f"), "\n", flush=True)
    return rows, verified


def measure_index(args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Least times of the index alone, by entries."""
    found = {}
    for entries in args.index:
        times = index_alone.measure(entries, min(4096, entries), args.index_rounds, args.policy)
        found[entries] = {name: min(values) for name, values in times.items()}
        found[entries] |= {f"{name} median": spread(values)[1] for name, values in times.items()}
    table = [{"entries": entries, **times} for entries, times in found.items()]
    print("The index alone, CPU microseconds an admitted block")
    print(tabulate(table, "keys", floatfmt=".2f"), "\n", flush=True)
    return found


def pick(rows: list[dict[str, Any]], store: str, leases: int) -> dict[str, Any] | None:
    """The batched result at the named history, or the longest below it that was measured."""
    fits = [row for row in rows if row["store"] == store and row["leases"] == leases]
    fits = [row for row in fits if row["stored"] != "one by one" and row["history"] <= NAMED]
    return max(fits, key=lambda row: row["history"], default=None)


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    print(machine())
    index = measure_index(args)
    rows, verified = measure_stores(args)
    bands = [sweep(row_bytes, args.row_total, max(2, args.quads // 3)) for row_bytes in args.rows]
    if bands:
        print(tabulate(bands, "keys", floatfmt=".2f"), "\n")
    own, leased, other = pick(rows, "own", 0), pick(rows, "own", LEASES), pick(rows, "in-tree", 0)
    longest = max(index)
    result = {
        "block_us_50k": own and round(own["us"], 2),
        "in_tree_block_us_50k": other and round(other["us"], 2),
        "speedup_50k": other and round(other["speedup"][1], 2),
        "leased_front_ratio": leased and round(leased["front_ratio"][1], 3),
        "index_us_1m": round(index[longest]["evict"], 2),
        "victim_visits_max": index_alone.victim_visits_max(min(longest, 20_000), LEASES),
        "entry_bytes": round(index_alone.entry_bytes(min(longest, ENTRIES_TRACED), args.policy)),
        # What was measured where an option named other sizes.
        "history": own and own["history"],
        "index_entries": longest,
        "index_scattered_us": round(index[longest]["scattered"], 2),
        "verified_blocks": verified,
        "rows": bands,
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
