"""Show the snapshot cache at work, on any machine with two cores: ``make demo``.

Builds a small random model, starts a real Xinference and launches the model twice through the
real command line: once without the cache, for the outputs to compare with, and once with two
replicas and the cache. Then every prompt is sent three times, one after the other: to one replica,
to the other, and to both again. Xinference gives requests to replicas in turns. Two things are made
small on purpose, and said so to the reader: the GPU tier, so that snapshots are demoted to the CPU
tier, and the engine's own KV pool, so that it forgets a prompt before it comes again. On a real
model the pool is small by itself, next to the prompts that come.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
from pathlib import Path

from examples.demo.client import Client
from examples.demo.report import HEADER, Record, Report
from examples.demo.server import (
    BLOCK_TOKENS,
    LAUNCH_SECONDS,
    Server,
    ServerError,
    build_model,
    engine_flags,
)
from examples.demo.session import Session

ROOT = Path(__file__).parents[2]
WORK_FOLDER = ROOT / ".demo"

REPLICAS = 2
PROMPTS = 6
#: A byte is a token: 4,300 tokens are 134 full blocks and a rest.
PROMPT_TOKENS = 4300
MAX_TOKENS = 12
MAX_MODEL_TOKENS = 4608
#: One longest request and nothing beside it: the engine's own prefix cache holds one prompt.
POOL_BLOCKS = MAX_MODEL_TOKENS // BLOCK_TOKENS + 1
#: About three of the six prompts that each replica gets: others are demoted to the CPU tier.
GPU_BUDGET = "300MiB"
CPU_BUDGET = "800MiB"

CACHE_FLAGS = (
    "--enable-xavier-gpu",
    *("--replica", str(REPLICAS)),
    *("--xavier-gpu-budget", GPU_BUDGET, "--xavier-cpu-budget", CPU_BUDGET),
)

INTRODUCTION = f"""\
[bold]A snapshot cache of KV blocks, on a toy model and without a GPU[/bold]
{PROMPTS} prompts of {PROMPT_TOKENS:,} tokens, to a real Xinference with two real vLLM replicas.
What one replica has computed, the other reads from it instead of computing it again.
Made small on purpose, so that hits are visible on a toy model:
  - the engine's own KV pool ({POOL_BLOCKS} blocks) forgets a prompt when the next one comes;
  - the GPU tier ({GPU_BUDGET}) holds about three prompts: older ones go to the CPU tier.
The "GPU tier" of this machine is plain memory: without a GPU, so are the engine's KV blocks.
"""


def make_prompts() -> list[str]:
    """Random words, the same in every run, that differ from the first token on."""
    letters = random.Random(2)
    return ["".join(letters.choices("abcdefgh ijklmnop", k=PROMPT_TOKENS)) for _ in range(PROMPTS)]


def launch(
    server: Server, report: Report, model_uid: str, flags: tuple[str, ...], replicas: int = 1
) -> Client:
    """Launch, and return when the model has loaded."""
    with report.console.status(f"launching {model_uid} (some 20 s)"):
        server.launch(model_uid, flags)
        client = Client(server.url, model_uid, MAX_TOKENS, replicas)
        server.wait(client.is_loaded, LAUNCH_SECONDS, f"{model_uid} has not loaded")
    return client


def run_baseline(server: Server, report: Report, model: Path, prompts: list[str]) -> list[str]:
    """Outputs of a launch without the cache."""
    client = launch(server, report, "plain", engine_flags(model, MAX_MODEL_TOKENS, POOL_BLOCKS))
    report.say(f"\n[bold]Launched without the cache[/bold]\n{HEADER}")
    outputs = []
    for number, prompt in enumerate(prompts):
        with report.console.status(f"prompt {number + 1} of {len(prompts)}"):
            answer = client.complete(prompt)
        report.add(Record(number + 1, "baseline", answer))
        outputs.append(answer.text)
    client.close()
    server.terminate("plain")
    return outputs


def run_cached(
    server: Server, report: Report, model: Path, prompts: list[str], expected: list[str]
) -> dict[str, object]:
    """The same prompts with the cache; returns the figures of the last line."""
    flags = (*engine_flags(model, MAX_MODEL_TOKENS, POOL_BLOCKS), *CACHE_FLAGS)
    client = launch(server, report, "cached", flags, REPLICAS)
    no_cache = "the replicas do not share: run `xinference-xavier doctor`. Nothing heard"
    server.wait(client.has_cache, 60, no_cache)
    report.say(f"\n[bold]Launched with {' '.join(CACHE_FLAGS)}[/bold]\n{HEADER}")
    session = Session(client, report, prompts, expected)
    start = session.state
    for number in range(PROMPTS):
        session.ask(number, "first")
    for _ in range(PROMPTS):
        session.ask(session.choose(of_others=True), "other")
    for _ in range(PROMPTS):
        session.ask(session.choose(of_others=False), "again")
    summary = report.summary(start, session.state)
    client.close()
    return summary


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report()
    report.say(INTRODUCTION)
    home = WORK_FOLDER / f"home-{os.getpid()}"
    shutil.rmtree(home, ignore_errors=True)
    try:
        with report.console.status("building the model"):
            model = build_model(WORK_FOLDER)
        prompts = make_prompts()
        with contextlib.ExitStack() as stack:
            with report.console.status("starting Xinference"):
                server = stack.enter_context(Server(home))
            report.say(f"Xinference is up at {server.url}, its log in {server.log}")
            expected = run_baseline(server, report, model, prompts)
            summary = run_cached(server, report, model, prompts, expected)
            report.say("\nStopping Xinference")
    except ServerError as error:
        report.console.print(f"[red]{error}[/red]", markup=True)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(home, ignore_errors=True)
        report.say("Interrupted; everything it started has been stopped.")
        return 130
    shutil.rmtree(home)  # kept after a failure, for its log
    return report.finish(summary)


if __name__ == "__main__":
    sys.exit(main())
