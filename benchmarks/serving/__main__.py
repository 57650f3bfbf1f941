"""Two real CPU replicas behind a real Xinference under load, with the cache and without it.

``python -m benchmarks.serving [--scale 0.1] [--modes plain xavier nixl] [--results FILE]``

The workload is that of a published comparison: 8 ongoing streams, then 32 unique prompts of about
4,400 tokens 100 ms apart, three rounds, output caps 64 (incoming) and 1,024 (streams). Further
parts: all-unique prompts; the same load with 8 shared prefixes computed at one replica and asked at
the other; 50 requests at once for one prefix of 10,000 tokens that a peer has; prompts computed
before at concurrency 16 and 32; conversations of several turns. ``--scale`` scales prompts and
caps: at full size one mode run takes the better part of an hour on two cores.

Modes: ``plain`` (two replicas without the cache), ``xavier`` (with it), ``nixl`` (vLLM's own
prefill/decode pair on the same two cores), ``nixl-calm`` (the pair, without NIXL's spinning
thread), ``small`` (8 MiB of GPU budget and an engine that forgets: must demote and hit both tiers;
its only part is ``tiers``). The engine's KV pool is the same in all others, at least ten times the
GPU budget. Modes run in the order A B B A, each on a fresh server.

Every part of every mode run is kept in the results file when it has ended; the same command
continues where an earlier one ended, and ``--runs`` bounds how many mode runs one command does.
Prints tables and, last, one JSON object of what the file holds.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import fields
from pathlib import Path

from benchmarks.serving.plots import draw
from benchmarks.serving.profile import find_py_spy
from benchmarks.serving.report import rounds_table, summarise, table
from benchmarks.serving.runs import Runs, Settings, order, read
from benchmarks.serving.servers import check_modes, make_model, row_bytes
from benchmarks.serving.workload import PARTS, Sizes

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 32
MIB = 1 << 20
#: The default budget at full scale.
GPU_BUDGET = 256 * MIB
LEAST_GPU_BUDGET = 16 * MIB
POOL_PER_BUDGET = 10
SMALL_BUDGET = 8 * MIB
#: Of the mode ``small``: three of its prompts fit into its GPU tier's 128 rows of 64 KiB.
SMALL_PROMPT_TOKENS = 1000


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scale", type=float, default=0.1, help="of prompts and output caps")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    parser.add_argument("--modes", nargs="+", default=["plain", "xavier"])
    parser.add_argument("--parts", nargs="+", default=[p for p in PARTS if p != "tiers"])
    parser.add_argument("--repeats", type=int, default=1, help="how often A B B A")
    parser.add_argument("--runs", type=int, default=1000, help="mode runs of this command, at most")
    parser.add_argument("--size", default="demo", help="of the random model (tiny_model.py)")
    parser.add_argument("--results", type=Path, default=ROOT / ".demo" / "serving.jsonl")
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo" / "serving")
    parser.add_argument("--plots", type=Path, help="folder for plots as PNG")
    parser.add_argument("--profile", action="store_true", help="sample schedulers with py-spy")
    parser.add_argument("--report", action="store_true", help="run nothing, report the results")
    return parser


def settle(chosen: argparse.Namespace) -> Settings:
    """Sizes, pool and budgets. Raises ``ValueError`` for what cannot work."""
    check_modes(chosen.modes)
    for part in chosen.parts:
        if part not in PARTS:
            raise ValueError(f"--parts {part}: choose from {', '.join(PARTS)}")
    if "small" in chosen.modes and set(chosen.modes) != {"small"}:
        raise ValueError("--modes small: its engine is another one; run it alone")
    given = {field.name: getattr(chosen, field.name) for field in fields(Sizes)}
    counts = {name: value for name, value in given.items() if value is not None}
    if chosen.modes == ["small"]:
        return small(Sizes.scaled(chosen.scale, **counts))
    sizes = Sizes.scaled(chosen.scale, **counts)
    budget = max(LEAST_GPU_BUDGET, int(GPU_BUDGET * chosen.scale))
    row = row_bytes(make_model(ROOT / ".demo", chosen.size), BLOCK_TOKENS)
    pool = max(-(-POOL_PER_BUDGET * budget // row), 2 * sizes.max_model_tokens // BLOCK_TOKENS)
    return Settings(sizes, chosen.size, BLOCK_TOKENS, pool, budget, 2 * pool * row)


def small(sizes: Sizes) -> Settings:
    """An engine that holds one request, and 8 MiB that hold three."""
    kept = Sizes(
        prompt_tokens=SMALL_PROMPT_TOKENS,
        convoy_tokens=SMALL_PROMPT_TOKENS,
        incoming_cap=8,
        stream_cap=64,
        rounds=sizes.rounds,
    )
    pool = kept.max_model_tokens // BLOCK_TOKENS + 1
    return Settings(kept, "tiny", BLOCK_TOKENS, pool, SMALL_BUDGET, 16 * SMALL_BUDGET)


def run(chosen: argparse.Namespace, settings: Settings) -> None:
    """What the results file does not hold yet, as many mode runs as are allowed."""
    modes = ["small"] if chosen.modes == ["small"] else order(chosen.modes, chosen.repeats)
    parts = ["tiers"] if modes == ["small"] else chosen.parts
    chosen.folder.mkdir(parents=True, exist_ok=True)
    model = make_model(ROOT / ".demo", settings.model_size)
    runs = Runs(chosen.results, settings, chosen.folder, model)
    missing = runs.missing(modes, parts)
    for number in sorted({number for number, _, _ in missing})[: chosen.runs]:
        wanted = [part for at, _, part in missing if at == number]
        runs.run(number, modes[number], wanted, chosen.profile)


def main() -> int:
    # Servers end with us, also when we are told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = arguments()
    chosen = parser.parse_args()
    try:
        if chosen.profile:
            find_py_spy()
        settings = settle(chosen)
        read(chosen.results, settings)
    except ValueError as error:
        parser.error(str(error))
    if not chosen.report:
        run(chosen, settings)
    lines = read(chosen.results, settings)
    print(table(lines), rounds_table(lines), sep="\n\n")
    if chosen.plots is not None:
        try:
            print("plots:", *draw(lines, chosen.plots))
        except ImportError as error:
            print(error, file=sys.stderr)
    summary = summarise(lines)
    print(json.dumps(summary))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
