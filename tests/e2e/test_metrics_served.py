"""The metrics on a real server's page, and its accounts beside a stopwatch."""

from __future__ import annotations

import time

import pytest
from conversation import PROMPTS, answer, text
from server import Xinference, wait_until

from xinference_xavier.metrics import PREFIX


def scraped(server: Xinference, model_uid: str) -> dict[str, float]:
    """The model's series on the host's page."""
    page = server.client.get("/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(PREFIX)]
    own = [line for line in lines if f'model="{model_uid}"' in line]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in own}


def series(name: str, model_uid: str, **labels: str) -> str:
    pairs = sorted({"model": model_uid, "replica": "0", **labels}.items())
    inside = ",".join(f'{label}="{value}"' for label, value in pairs)
    return f"{PREFIX}{name}{{{inside}}}"


def counted(server: Xinference, uid: str) -> dict[str, float]:
    """Some of the series, as the replica's own statistics have them."""
    told = server.stats(uid)
    counters, tiers = told["counters"], told["tiers"]
    return {
        series("requests_total", uid): counters["requests"],
        series("prompt_tokens_total", uid, source="computed"): counters["tokens_computed"],
        series("moved_blocks_total", uid, kind="demotion"): counters["demotions"],
        series("snapshots", uid, tier="gpu"): tiers["gpu"]["snapshots"],
        series("snapshots", uid, tier="cpu"): tiers["cpu"]["snapshots"],
        series("copied_bytes_total", uid, kind="store"): told["copies"]["store"]["nbytes"],
        series("faults_total", uid, reason="copy"): 0,
        series("replica_up", uid): 1,
    }


def test_the_page_shows_what_the_replica_counts(server: Xinference, cached_model: str) -> None:
    for number in range(PROMPTS):
        answer(server, cached_model, number)
    assert counted(server, cached_model)[series("requests_total", cached_model)] >= PROMPTS
    wait_until(
        lambda: counted(server, cached_model).items() <= scraped(server, cached_model).items(),
        20,
        lambda: f"{counted(server, cached_model)}\n{scraped(server, cached_model)}",
    )


@pytest.mark.slow
def test_accounts_agree_with_a_stopwatch(server: Xinference, cached_model: str) -> None:
    """What a hit is said to save is about what it is seen to save."""
    prompt = text(77, 900)

    def seconds() -> float:
        began = time.perf_counter()
        server.complete(cached_model, prompt, max_tokens=1).raise_for_status()
        return time.perf_counter() - began

    cold = seconds()
    for number in range(PROMPTS):  # until the engine's own cache has forgotten it
        answer(server, cached_model, number)
    before = server.stats(cached_model)["accounts"]
    began = time.perf_counter()
    warm = seconds()
    after = server.stats(cached_model)["accounts"]
    took = time.perf_counter() - began
    grown = {name: after[name] - before[name] for name in after if name.endswith("_seconds")}
    print(f"cold {cold:.3f} s, warm {warm:.3f} s, {grown}")
    assert (cold - warm) / 10 < grown["saved_seconds"] < 10 * cold
    costs = [name for name in grown if name not in ("saved_seconds", "net_seconds")]
    assert all(0 <= grown[name] < took for name in costs)
    assert abs(grown["saved_seconds"] - sum(map(grown.get, costs)) - grown["net_seconds"]) < 1e-4
