"""Plots of a results file as PNG: times and throughput by part, one bar a mode.

Needs matplotlib; without it nothing is drawn and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.report import spreads

PLOTS = {
    "ttft_p50": "time to the first token, median (s)",
    "ttft_p95": "time to the first token, 95th percentile (s)",
    "gap_p99": "gap between chunks of ongoing streams, 99th percentile (s)",
    "tokens_per_second": "output tokens per second",
}


def draw(lines: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """One PNG for each figure in ``folder``; bars are medians, whiskers least and greatest.

    Raises ``ImportError`` with the remedy when matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ImportError("--plots needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    found = spreads(lines)
    return [path for name in PLOTS if (path := _bars(found, name, folder)) is not None]


def _bars(found: Mapping[tuple[str, str, str], Any], name: str, folder: Path) -> Path | None:
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(mode for mode, _, _ in found))
    labels = {
        (part, group): part if group == "incoming" else group
        for (_, part, group), figures in found.items()
        if name in figures
    }
    if not labels:
        return None
    figure = Figure(figsize=(2 + 1.6 * len(labels), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        for number, (part, group) in enumerate(labels):
            values = found.get((mode, part, group), {}).get(name)
            if values is None:
                continue
            middle = values["median"]
            whiskers = [[middle - values["least"]], [values["greatest"] - middle]]
            axes.bar(
                number + (place - (len(modes) - 1) / 2) * width,
                middle,
                width,
                yerr=whiskers,
                color=f"C{place}",
                capsize=3,
            )
    axes.set_xticks(range(len(labels)), list(labels.values()))
    axes.set_ylabel(PLOTS[name])
    axes.legend(
        handles=[_key(f"C{place}", mode) for place, mode in enumerate(modes)], frameon=False
    )
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    return path


def _key(color: str, mode: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=mode)
