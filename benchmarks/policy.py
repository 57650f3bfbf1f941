"""Replays a request trace through the policy: how much of each prompt is found, by capacity.

``python -m benchmarks.policy --trace FILE``. FILE has one JSON object a line with ``timestamp`` and
prefix ``hash_ids``, and may be .gz; without it a trace is made up. One replica under each policy
beside Belady's, which knows the future; then replicas that take requests in turns and read from
each other, beside one with all their rows. Prints tables and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.replay import belady, replay, replay_replicas
from benchmarks.traces import Trace, read_trace, synthetic_trace
from xinference_xavier.policy.order import order_factory

CAPACITIES = (1_000, 5_000, 20_000, 60_000)
#: Of LRU's share, at capacities where little of what comes back fits, and anywhere.
GAIN, GAIN_UP_TO, FLOOR = 1.3, 5_000, 0.99
#: Of one cache with the rows of all replicas.
SHARED = 0.95

Row = dict[str, Any]


def one_replica(trace: Trace, rows: int, policy: str, gpu_share: float) -> Row:
    lru = replay(trace, rows, order_factory("lru"), gpu_share)
    share = replay(trace, rows, order_factory(policy), gpu_share)
    return {
        "capacity": rows,
        "lru": round(lru, 4),
        policy: round(share, 4),
        "belady": round(belady(trace, rows), 4),
        "over_lru": round(share / lru, 3) if lru else None,
    }


def several(trace: Trace, replicas: int, rows: int, policy: str, gpu_share: float) -> Row:
    """``rows`` are those of all replicas together."""
    order, each = order_factory(policy), rows // replicas
    one = replay(trace, each * replicas, order, gpu_share)
    plain = replay_replicas(trace, replicas, each, order, False, gpu_share)
    aware = replay_replicas(trace, replicas, each, order, True, gpu_share)
    return {
        "capacity": each * replicas,
        "each": each,
        "one_cache": round(one, 4),
        "plain": round(plain, 4),
        "last_copy_aware": round(aware, 4),
        "plain_ratio": round(plain / one, 3) if one else None,
        "aware_ratio": round(aware / one, 3) if one else None,
    }


def missed(single: list[Row], shared: list[Row], replicas: int) -> list[str]:
    """Targets that these rows miss, in words."""
    found = []
    for row in single:
        target = GAIN if row["capacity"] <= GAIN_UP_TO else FLOOR
        if row["over_lru"] is not None and row["over_lru"] < target:
            found.append(f"over_lru at {row['capacity']}: {row['over_lru']} < {target}")
    for row in shared if replicas == 2 else ():
        if row["aware_ratio"] is not None and row["aware_ratio"] < SHARED:
            found.append(f"aware_ratio at 2 x {row['each']}: {row['aware_ratio']} < {SHARED}")
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="default: a trace is made up")
    parser.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES, metavar="BLOCKS")
    parser.add_argument("--policy", default="reuse", help="xavier_policy to compare with lru")
    parser.add_argument("--replicas", type=int, default=2, help="0: only one replica")
    parser.add_argument("--gpu-share", type=float, default=0.0, help="of the rows, in the GPU tier")
    parser.add_argument("--requests", type=int, default=8_000, help="of a trace made up")
    parser.add_argument("--seed", type=int, default=1, help="of a trace made up")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    trace = read_trace(args.trace) if args.trace else synthetic_trace(args.requests, args.seed)
    single = [one_replica(trace, n, args.policy, args.gpu_share) for n in args.capacities]
    print("One replica: share of blocks found as a prefix")
    print(tabulate(single, headers="keys"), flush=True)
    shared = []
    if args.replicas > 1:
        shared = [
            several(trace, args.replicas, n, args.policy, args.gpu_share) for n in args.capacities
        ]
        print(f"\n{args.replicas} replicas with {args.policy}, requests in turns")
        print(tabulate(shared, headers="keys"))
    result = {
        "trace": args.trace.name if args.trace else f"synthetic, seed {args.seed}",
        "requests": len(trace),
        "blocks": sum(map(len, trace)),
        "distinct": len({block for blocks in trace for block in blocks}),
        "policy": args.policy,
        "gpu_share": args.gpu_share,
        "one_replica": single,
        "replicas": args.replicas,
        "shared": shared,
        "targets_missed": missed(single, shared, args.replicas) if args.trace else [],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
