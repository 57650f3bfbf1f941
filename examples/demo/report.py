"""What the reader sees: one line per request, then a verdict and one line of JSON.

Covers: formatting and the verdict. Does not cover: measuring (``client.py``). Plain functions and
one class, used by the demonstration's only thread.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console

from examples.demo.client import Answer, CacheState, Counters

HEADER = (
    f"{'prompt':<8}{'pass':<10}{'replica':<8}{'TTFT':>9}{'GPU tier':>10}{'CPU tier':>10}"
    f"{'peer':>8}{'engine':>8}{'computed':>10}  output"
)


@dataclass(frozen=True)
class Record:
    """One request: which prompt, in which pass, its answer and its share of the counters."""

    prompt: int
    phase: str
    answer: Answer
    expected: str | None = None
    spent: Counters | None = None
    replica: int | None = None

    @property
    def as_expected(self) -> bool:
        return self.expected is None or self.answer.text == self.expected

    def mostly_from(self, source: str) -> bool:
        """True when more than half of the prompt's tokens came from ``source``."""
        spent = self.spent
        return spent is not None and 2 * getattr(spent, f"tokens_{source}") > spent.tokens_prompt

    def line(self) -> str:
        start = f"{self.prompt:<8}{self.phase:<10}{self._replica_name():<8}"
        if self.answer.error:
            return f"{start}[red]failed: {self.answer.error}[/red]"
        verdict = "" if self.expected is None else "same" if self.as_expected else "DIFFERS"
        gpu, cpu, peer, engine, computed = (
            "" if self.spent is None else f"{getattr(self.spent, f'tokens_{source}'):,}"
            for source in ("gpu", "cpu", "peer", "engine", "computed")
        )
        return (
            f"{start}{self.answer.ttft_seconds:>7.2f} s{gpu:>10}{cpu:>10}{peer:>8}{engine:>8}"
            f"{computed:>10}  {verdict}"
        )

    def _replica_name(self) -> str:
        return "" if self.replica is None else "AB"[self.replica]


@dataclass
class Report:
    """Collects records, and prints them while the demonstration works."""

    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    records: list[Record] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.console.print(text)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.console.print(record.line())

    def summary(self, before: CacheState, after: CacheState) -> dict[str, object]:
        """The figures of the last line. Hits and misses are blocks, times are seconds."""
        grown = after.counters - before.counters
        answered = [r for r in self.records if not r.answer.error]
        cached = [r for r in answered if r.spent]
        return {
            "requests": len(self.records),
            "failed": len(self.records) - len(answered),
            "identical_outputs": bool(cached) and all(r.as_expected for r in cached),
            "gpu_snapshots": after.gpu_snapshots,
            "cpu_snapshots": after.cpu_snapshots,
            "demotions": grown.demotions,
            "hits_gpu": grown.hits_gpu_blocks,
            "hits_cpu": grown.hits_cpu_blocks,
            "hits_peer": grown.hits_peer_blocks,
            "misses": grown.misses_blocks,
            "fetches": after.fetches - before.fetches,
            "fetch_failures": after.fetch_failures - before.fetch_failures,
            "ttft_cold_p50_s": _median(r for r in cached if r.mostly_from("computed")),
            "ttft_gpu_hit_p50_s": _median(r for r in cached if r.mostly_from("gpu")),
            "ttft_cpu_hit_p50_s": _median(r for r in cached if r.mostly_from("cpu")),
            "ttft_peer_hit_p50_s": _median(r for r in cached if r.mostly_from("peer")),
        }

    def finish(self, summary: dict[str, object]) -> int:
        """Print the verdict and, last, the figures as JSON; returns the exit status."""
        problems = find_problems(summary)
        for problem in problems:
            self.console.print(f"[red]Not shown: {problem}[/red]")
        if not problems:
            self.console.print("Every output equals the one without the cache.")
        print(json.dumps(summary), flush=True)
        return 1 if problems else 0


def find_problems(summary: dict[str, object]) -> list[str]:
    """What the demonstration should have shown and did not; empty when all is well."""
    checks = {
        "a request failed": summary["failed"] == 0,
        "an output differs from that of the launch without the cache": summary["identical_outputs"],
        "no snapshot was found in the GPU tier": summary["hits_gpu"],
        "no snapshot was found in the CPU tier": summary["hits_cpu"],
        "no snapshot of the other replica was found": summary["hits_peer"],
        "nothing was demoted": summary["demotions"],
    }
    return [text for text, ok in checks.items() if not ok]


def _median(records: Iterable[Record]) -> float | None:
    """Median time to the first token in seconds; None without a record."""
    times = [record.answer.ttft_seconds for record in records]
    return round(statistics.median(times), 3) if times else None
