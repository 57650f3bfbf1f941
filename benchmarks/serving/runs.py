"""Runs modes one after the other and keeps what they gave, so that a run can be continued.

Covers: the order, one fresh server a mode run, rounds, the results file: one JSON line for each
part of each mode run, written when the part has ended. Does not cover what is made of it
(``report.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.measure import difference, failed, figures
from benchmarks.serving.profile import profiled
from benchmarks.serving.servers import Pair, Setup, Xinference, serve
from benchmarks.serving.workload import Sizes, Stage, rounds

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Settings:
    """What must be the same for all lines of a results file."""

    sizes: Sizes
    model_size: str
    block_tokens: int
    pool_blocks: int
    gpu_budget: int
    cpu_budget: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def order(modes: Sequence[str], repeats: int) -> list[str]:
    """A B B A for two modes, A B C C B A for three, ``repeats`` times."""
    return [*modes, *reversed(modes)] * repeats


def read(path: Path, settings: Settings) -> list[dict[str, Any]]:
    """Lines of a results file, none when there is no file.

    Raises ``ValueError`` when they come from other settings.
    """
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if any(line["settings"] != settings.as_json() for line in lines):
        raise ValueError(f"--results {path} holds runs of other sizes: name another file")
    return lines


class Runs:
    """The mode runs of one results file."""

    def __init__(self, path: Path, settings: Settings, folder: Path, model: Path) -> None:
        self._path = path
        self._settings = settings
        self._folder = folder
        self._model = model

    def missing(self, modes: Sequence[str], parts: Sequence[str]) -> list[tuple[int, str, str]]:
        """Position in the order, mode and part of what the file does not hold yet."""
        done = {(line["run"], line["mode"], line["part"]) for line in self._lines()}
        wanted = [(run, mode, part) for run, mode in enumerate(modes) for part in parts]
        return [each for each in wanted if each not in done]

    def run(self, run: int, mode: str, parts: Sequence[str], profile: bool) -> None:
        """One mode run, on a fresh server; each part is kept as soon as it has ended."""
        setup = self._setup(run, mode)
        print(f"run {run + 1}, {mode}: starting", flush=True)
        with serve(mode, setup) as server:
            for part in parts:
                started = time.time()
                found = [
                    self._round(server, stages, profile)
                    for stages in rounds(part, self._settings.sizes)
                ]
                self._keep(run, mode, part, found)
                print(f"run {run + 1}, {mode}: {part}, {time.time() - started:.0f} s", flush=True)

    def _round(
        self, server: Xinference | Pair, stages: Sequence[Stage], profile: bool
    ) -> dict[str, Any]:
        server.settle()
        before, started = server.counters(), time.monotonic()
        pids = server.schedulers() if profile and isinstance(server, Xinference) and before else []
        with profiled(pids, self._folder) as samples:
            records = send(server, plan(stages, steered=isinstance(server, Xinference)))
        seconds = time.monotonic() - started
        server.settle()
        counted = None if before is None else difference(server.counters(), before)
        found = {
            "seconds": seconds,
            "figures": figures(records),
            "failed": failed(records),
            "counters": counted,
        }
        return {**found, "profile": samples} if samples else found

    def _setup(self, run: int, mode: str) -> Setup:
        settings = self._settings
        return Setup(
            folder=self._folder / f"{run}-{mode}-{time.time_ns()}",
            model=self._model,
            max_model_tokens=settings.sizes.max_model_tokens,
            pool_blocks=settings.pool_blocks,
            gpu_budget=settings.gpu_budget,
            cpu_budget=settings.cpu_budget,
        )

    def _lines(self) -> list[dict[str, Any]]:
        return read(self._path, self._settings)

    def _keep(self, run: int, mode: str, part: str, found: list[dict[str, Any]]) -> None:
        line = {
            "run": run,
            "mode": mode,
            "part": part,
            "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "settings": self._settings.as_json(),
            "rounds": found,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def plan(stages: Sequence[Stage], steered: bool) -> list[dict[str, object]]:
    """Stages for the client; without steering requests where no two replicas take turns."""
    kept = [
        replace(stage, requests=tuple(r for r in stage.requests if steered or r.group != "steer"))
        for stage in stages
    ]
    return [stage.plan() for stage in kept if stage.requests]


def send(server: Xinference | Pair, stages: list[dict[str, object]]) -> list[dict[str, Any]]:
    """Let a client process send ``stages``. Raises ``RuntimeError`` with what it said last."""
    asked = json.dumps({"target": asdict(server.target), "stages": stages})
    command = [sys.executable, "-m", "benchmarks.serving.client"]
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the client ended with {done.returncode}:\n{done.stderr[-2000:]}")
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records
