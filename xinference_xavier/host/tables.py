"""Answers of ``/v1/xavier`` as plain tables, for the command line.

Plain functions of what the API answered; any process and thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from xinference_xavier.config import format_size

Json = dict[str, Any]
Row = Sequence[object]


def table(header: Row, rows: Sequence[Row]) -> str:
    """Columns wide enough for their content; numbers to the right."""
    return str(tabulate(rows, header, tablefmt="plain"))


def show_stats(answer: Json) -> str:
    """All models, or one."""
    models = answer.get("models", [answer])
    if not models:
        return "No running model keeps snapshots. Launch one with --enable-xavier-gpu."
    return "\n\n".join(_show_model(model) for model in models)


def _show_model(model: Json) -> str:
    if not model["replicas"]:
        return f"{model['model_uid']}: {model['detail']}"
    rows = [row for replica in model["replicas"] for row in _replica_rows(replica)]
    header = ("replica", "tier", "snapshots", "rows", "bytes", "budget", "hits", "note")
    lines = [model["model_uid"], table(header, rows)]
    for replica in model["replicas"]:
        if replica["stats"]:
            lines.append(_tokens(replica["replica"], replica["stats"]["counters"]))
    return "\n".join(lines)


def _replica_rows(replica: Json) -> Iterator[Row]:
    stats, number = replica["stats"], replica["replica"]
    if not stats:
        yield (number, "-", 0, 0, "0", "-", 0, replica["state"])
        return
    notes = ["stale"] if replica["stale"] else []
    notes += ["stores paused"] if stats.get("stores_paused") else []
    for name, tier in stats["tiers"].items():
        going = tier.get("leaving", 0)
        note = ", ".join([*notes, *([f"{going} rows leaving"] if going else [])])
        hits = stats["counters"][f"hits_{name}_blocks"]
        sizes = (format_size(tier["bytes"]), format_size(tier["budget_bytes"]))
        yield (number, name.upper(), tier["snapshots"], tier["rows"], *sizes, hits, note)


def _tokens(number: int, counters: Mapping[str, int]) -> str:
    parts = ("engine", "gpu", "cpu", "peer", "computed")
    found = ", ".join(f"{counters['tokens_' + part]} {part}" for part in parts)
    return f"Replica {number}: {counters['tokens_prompt']} prompt tokens: {found}."


def show_cleared(answer: Json) -> str:
    rows = [(r["replica"], r["removed_now"], r["removed_later"]) for r in _answered(answer)]
    return table(("replica", "removed", "removed when released"), rows) if rows else ""


def show_resized(answer: Json) -> str:
    rows = [
        (
            replica["replica"],
            name.upper(),
            format_size(replica[name]["budget_bytes"]),
            *(replica[name][field] for field in ("rows", "rows_leaving", "state")),
            replica[name]["note"] or "",
        )
        for replica in _answered(answer)
        for name in ("gpu", "cpu")
    ]
    header = ("replica", "tier", "budget", "rows", "leaving", "state", "note")
    return table(header, rows) if rows else ""


def show_found(answer: Json) -> str:
    names = ("engine", "gpu", "cpu", "peer", "not_cached", "prefix")
    rows = [(r["replica"], *(r[name] for name in names)) for r in _answered(answer)]
    header = ("replica", "engine", "GPU", "CPU", "peer", "not cached", "prefix")
    found = f"{answer['tokens']} tokens"
    return f"{found}\n{table(header, rows)}" if rows else found


def show_paused(answer: Json) -> str:
    rows = [(r["replica"], "paused" if r["paused"] else "on") for r in _answered(answer)]
    return table(("replica", "stores"), rows) if rows else ""


def _answered(answer: Json) -> list[Json]:
    return [replica for replica in answer["replicas"] if replica["problem"] is None]
