"""What the results file says: a table, the targets, one JSON object.

Pure functions of the file's lines. A target is judged on the median of its ratios; each ratio is
of one round of the cache and the same round of its partner: the n-th run of the one mode with the
n-th of the other, which stand next to each other in A B B A. Ratios are given with their least and
greatest.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

Line = Mapping[str, Any]
COLUMNS = ("ttft_p50", "ttft_p95", "tpot_p95", "gap_p99", "tokens_per_second")
#: Of the cache's counters, what a reader wants first.
SHOWN = ("tokens_engine", "tokens_gpu", "tokens_cpu", "tokens_peer", "tokens_computed", "demotions")


@dataclass(frozen=True)
class Target:
    """``figure`` of the mode ``xavier`` over that of ``against``: at most or at least ``bound``."""

    name: str
    part: str
    figure: str
    against: str
    bound: float
    at_most: bool = True

    def met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.at_most else ratio >= self.bound


#: Rows that need no GPU and that this workload covers.
TARGETS = (
    Target("interleaved TTFT p50", "interleaved", "ttft_p50", "plain", 1.02),
    Target("interleaved TTFT p95", "interleaved", "ttft_p95", "plain", 1.02),
    Target("interleaved TTFT p50, NIXL pair", "interleaved", "ttft_p50", "nixl", 1.0),
    Target("interleaved TTFT p95, NIXL pair", "interleaved", "ttft_p95", "nixl", 1.0),
    Target(
        "interleaved TTFT p50, NIXL pair that pauses", "interleaved", "ttft_p50", "nixl-calm", 1
    ),
    Target(
        "interleaved TTFT p95, NIXL pair that pauses", "interleaved", "ttft_p95", "nixl-calm", 1
    ),
    Target("ongoing streams' gap p99", "interleaved", "gap_p99", "plain", 1.03),
    Target("shared prefixes TTFT p50", "shared", "ttft_p50", "plain", 1 / 3),
    Target("all-unique tokens/s", "unique", "tokens_per_second", "plain", 0.98, at_most=False),
    Target("all-unique TTFT", "unique", "ttft_p50", "plain", 1.01),
    Target("convoy tokens/s", "convoy", "tokens_per_second", "plain", 1.0, at_most=False),
)


def summarise(lines: Sequence[Line]) -> dict[str, Any]:
    """The JSON object: figures by mode and part, ratios, targets met and missed, what failed."""
    judged = [found for target in TARGETS if (found := _judge(target, lines)) is not None]
    judged += [*_counted("convoy fetches", "xavier", lines), *_tiers(lines)]
    return {
        "settings": lines[0]["settings"] if lines else None,
        "runs": [f"{run}:{mode}" for run, mode in sorted({(x["run"], x["mode"]) for x in lines})],
        "figures": {f"{m}/{p}/{g}": found for (m, p, g), found in spreads(lines).items()},
        "counters": _counters(lines),
        "scheduler": scheduler(lines),
        "failed": [f"{x['mode']}/{x['part']}: {what}" for x, what in _failures(lines)],
        "targets": judged,
        "targets_missed": [each["name"] for each in judged if not each["met"]],
        "targets_not_covered": _not_covered(judged),
    }


def spreads(lines: Sequence[Line]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Median, least and greatest of each figure over rounds and runs, by mode, part and group."""
    values: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in lines:
        for found in line["rounds"]:
            for group, figures in found["figures"].items():
                for name in COLUMNS:
                    if figures[name] is not None:
                        key = (line["mode"], line["part"], group)
                        values[key][name].append(figures[name])
    return {
        key: {name: spread(found) for name, found in by_name.items()}
        for key, by_name in values.items()
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, greatest and count."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "greatest": max(values),
        "n": len(values),
    }


def table(lines: Sequence[Line]) -> str:
    """Figures for people: medians with their spread; times in milliseconds."""
    rows = [
        [mode, part if group == "incoming" else group, *(_cell(found, c) for c in COLUMNS)]
        for (mode, part, group), found in sorted(spreads(lines).items(), key=_by_part)
    ]
    heads = ["mode", "part", "TTFT p50", "TTFT p95", "TPOT p95", "stream gap p99", "tokens/s"]
    return str(tabulate(rows, headers=heads, disable_numparse=True))


def rounds_table(lines: Sequence[Line]) -> str:
    """Counters of the cache, round by round."""
    rows = []
    for line in lines:
        for number, found in enumerate(line["rounds"]):
            if found["counters"] is not None:
                counters, sharing = found["counters"]["counters"], found["counters"]["sharing"]
                row = [line["run"] + 1, line["mode"], line["part"], number + 1]
                rows.append([*row, *(counters[c] for c in SHOWN), sharing["fetches"]])
    heads = ["run", "mode", "part", "round", *SHOWN, "fetches"]
    return str(tabulate(rows, headers=heads))


def ratios(target: Target, lines: Sequence[Line]) -> list[float]:
    """Of each round of the cache and its partner's; empty when either was not run."""
    ours = _by_run("xavier", target.part, lines)
    theirs = _by_run(target.against, target.part, lines)
    found = []
    for mine, other in zip(ours, theirs, strict=False):
        for a, b in zip(mine["rounds"], other["rounds"], strict=True):
            above = a["figures"]["incoming"][target.figure]
            below = b["figures"]["incoming"][target.figure]
            if above is not None and below:
                found.append(above / below)
    return found


def scheduler(lines: Sequence[Line]) -> dict[str, Any]:
    """Share of the scheduler thread's time that the cache takes, by mode and part, of all replicas.

    ``connector``: by the cache's own clock, of wall time. ``of_all`` and ``of_busy``: by py-spy's
    samples, when there are any.
    """
    found: dict[str, Any] = {}
    for line in lines:
        counted = [r for r in line["rounds"] if r["counters"] is not None]
        if not counted:
            continue
        spent = sum(r["counters"]["accounts"]["scheduler_seconds"] for r in counted)
        wall = sum(r["seconds"] for r in counted) * 2
        entry = found.setdefault(f"{line['mode']}/{line['part']}", {"connector": []})
        entry["connector"].append(spent / wall)
        samples = [each for r in counted for each in r.get("profile", [])]
        ours = sum(each["ours"] for each in samples)
        for name, of in (("of_all", "samples"), ("of_busy", "busy")):
            if samples:
                entry.setdefault(name, []).append(ours / max(1, sum(e[of] for e in samples)))
    return {
        part: {name: spread(values) for name, values in entry.items()}
        for part, entry in found.items()
    }


def _judge(target: Target, lines: Sequence[Line]) -> dict[str, Any] | None:
    found = ratios(target, lines)
    if not found:
        return None
    ratio = spread(found)
    bound = f"{'<=' if target.at_most else '>='} {target.bound:.3g} x {target.against}"
    met = target.met(ratio["median"])
    return {"name": target.name, "target": bound, "ratio": ratio, "met": met}


def _counted(name: str, mode: str, lines: Sequence[Line]) -> Iterable[dict[str, Any]]:
    """A convoy is one fetch in each round."""
    fetches = [
        found["counters"]["sharing"]["fetches"]
        for line in _by_run(mode, "convoy", lines)
        for found in line["rounds"]
    ]
    if fetches:
        met = all(count == 1 for count in fetches)
        yield {"name": name, "target": "1 a round", "fetches": fetches, "met": met}


def _tiers(lines: Sequence[Line]) -> Iterable[dict[str, Any]]:
    """The small budget must demote, and hit both tiers."""
    counted = [
        found["counters"]["counters"]
        for line in _by_run("small", "tiers", lines)
        for found in line["rounds"]
    ]
    if counted:
        names = ("demotions", "hits_gpu_blocks", "hits_cpu_blocks")
        sums = {name: [each[name] for each in counted] for name in names}
        met = all(value > 0 for values in sums.values() for value in values)
        yield {"name": "small budget hits both tiers", "target": "> 0", **sums, "met": met}


def _not_covered(judged: Sequence[Mapping[str, Any]]) -> list[str]:
    names = {each["name"] for each in judged}
    wanted = [target.name for target in TARGETS]
    wanted += ["convoy fetches", "small budget hits both tiers"]
    return [name for name in wanted if name not in names]


def _counters(lines: Sequence[Line]) -> dict[str, dict[str, int]]:
    summed: dict[str, dict[str, int]] = {}
    for line in lines:
        for found in line["rounds"]:
            if found["counters"] is not None:
                entry = summed.setdefault(f"{line['mode']}/{line['part']}", defaultdict(int))
                for name in SHOWN:
                    entry[name] += found["counters"]["counters"][name]
    return summed


def _failures(lines: Sequence[Line]) -> Iterable[tuple[Line, str]]:
    return ((x, what) for x in lines for found in x["rounds"] for what in found["failed"])


def _by_run(mode: str, part: str, lines: Sequence[Line]) -> list[Line]:
    of_run: Callable[[Line], int] = lambda line: line["run"]  # noqa: E731
    return sorted((x for x in lines if x["mode"] == mode and x["part"] == part), key=of_run)


def _by_part(entry: tuple[tuple[str, str, str], Any]) -> tuple[str, str, str]:
    mode, part, group = entry[0]
    return part, group, mode


def _cell(found: Mapping[str, Mapping[str, float]], name: str) -> str:
    if name not in found:
        return "-"
    factor = 1 if name == "tokens_per_second" else 1000
    values = [found[name][key] * factor for key in ("median", "least", "greatest")]
    return "{:,.1f} ({:,.1f}-{:,.1f})".format(*values)
