"""Two replicas of one launch: what one has computed is a hit on the other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conversation import PROMPTS, Said, answer, ask, text
from server import BIN, Xinference, flags, wait_until

#: As for the shared cached model: engines that forget, and every copy checked.
ENGINE = flags({"num_gpu_blocks_override": 136, "xavier_self_check": 1})
BUDGETS = ("--xavier-gpu-budget", "16MiB", "--xavier-cpu-budget", "64MiB")
BLOCKS = 2000 // 32


@pytest.fixture(scope="module")
def shared(
    server: Xinference, tiny_model: Path, plain: tuple[dict[str, object], Said]
) -> Iterator[str]:
    """Uid of a model with two replicas that share."""
    launched = server.launch(
        "shared", tiny_model, "--replica", "2", "--enable-xavier-gpu", *BUDGETS, *ENGINE
    )
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("shared")
    wait_until(lambda: all(peers(each) == 1 for each in replicas(server)), 120, server.tail)
    yield "shared"
    server.terminate("shared")


def replicas(server: Xinference) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/v1/xavier/shared").json()["replicas"]
    return found if len(found) == 2 else [{}]


def peers(replica: dict[str, Any]) -> int:
    share = replica.get("share")
    sharing = (replica.get("stats") or {}).get("sharing", {})
    return len(share["shares_with"]) if share and sharing.get("peers") else 0


def counter(server: Xinference, name: str) -> int:
    return sum(replica["stats"]["counters"][name] for replica in replicas(server))


def asked(server: Xinference) -> int:
    return counter(server, "requests")


def test_replicas_say_that_they_share(server: Xinference, shared: str) -> None:
    first, second = (replica["share"] for replica in replicas(server))
    assert first["scope"] == second["scope"]
    assert first["namespace"] == second["namespace"]
    assert first["problem"] is None
    assert first["not_with"] == second["not_with"] == []


def test_a_prompt_of_one_replica_is_a_hit_on_the_other(
    server: Xinference, shared: str, plain: tuple[dict[str, object], Said]
) -> None:
    """Xinference gives requests to its replicas in turns: the second time is the other one's."""
    _, said = plain
    for number in range(PROMPTS):
        before = counter(server, "hits_peer_blocks"), asked(server)
        assert answer(server, shared, number) == said.answers[number]
        wait_until(lambda b=before: asked(server) > b[1], 30, server.tail)
        assert answer(server, shared, number) == said.answers[number]
        wait_until(lambda b=before: asked(server) == b[1] + 2, 30, server.tail)
        assert counter(server, "hits_peer_blocks") - before[0] == BLOCKS, number
    assert counter(server, "mismatches") == counter(server, "failed_copies") == 0
    for replica in replicas(server):
        assert not replica["stats"]["sharing"]["fetch_failures"]
        assert replica["stats"]["sharing"]["leases"] == 0


def test_a_salt_keeps_tenants_apart(server: Xinference, shared: str) -> None:
    prompt = text(50, 1000)
    ask(server, shared, prompt)
    before = counter(server, "tokens_peer"), counter(server, "tokens_computed"), asked(server)
    for salt in ("a", "b"):
        answered = server.complete(shared, prompt, max_tokens=16, cache_salt=salt)
        answered.raise_for_status()
    wait_until(lambda: asked(server) == before[2] + 2, 30, server.tail)
    assert counter(server, "tokens_peer") == before[0]
    assert counter(server, "tokens_computed") - before[1] == 2000


# -- steering: from here on the caches are emptied -----------------------------------------------


def steer(server: Xinference, *arguments: str) -> dict[str, Any]:
    """A command of ours; what it answered."""
    command = [BIN / "xinference-xavier", *arguments, "--json", "--endpoint", server.url]
    done = server.run(*command)
    assert done.returncode == 0, done.stderr
    answered: dict[str, Any] = json.loads(done.stdout)
    return answered


def snapshots(server: Xinference) -> int:
    tiers = [tier for each in replicas(server) for tier in each["stats"]["tiers"].values()]
    return sum(tier["snapshots"] for tier in tiers)


def test_a_lookup_finds_a_prompt_where_it_is(server: Xinference, shared: str) -> None:
    ask(server, shared, text(60, 1000))
    wait_until(lambda: not any(jobs(server)), 30, server.tail)
    found = steer(server, "lookup", shared, text(60, 1000))
    assert found["tokens"] == 1000
    for replica in found["replicas"]:
        places = ("engine", "gpu", "cpu", "peer", "not_cached")
        assert sum(replica[name] for name in places) == 1000
        assert replica["prefix"] == 1000 // 32 * 32, "here or at the other one"
    assert sum(replica["peer"] > 0 for replica in found["replicas"]) == 1
    other = steer(server, "lookup", shared, text(60, 1000), "--cache-salt", "a")
    assert all(replica["not_cached"] == 1000 for replica in other["replicas"])


@pytest.mark.slow
def test_messages_are_looked_up_as_a_chat_asks_them(server: Xinference, shared: str) -> None:
    messages = [{"role": "user", "content": text(61, 900)}]
    body = {"model": shared, "messages": messages, "max_tokens": 4, "temperature": 0}
    answered = server.client.post("/v1/chat/completions", json=body).json()
    wait_until(lambda: not any(jobs(server)), 30, server.tail)
    found = steer(server, "lookup", shared, json.dumps(messages), "--messages")
    assert found["tokens"] == answered["usage"]["prompt_tokens"]
    assert found["replicas"][0]["prefix"] == found["tokens"] // 32 * 32


def jobs(server: Xinference) -> list[int]:
    return [replica["stats"]["jobs_in_flight"] for replica in replicas(server)]


def test_idle_engines_clear_at_once(server: Xinference, shared: str) -> None:
    held = snapshots(server)
    assert held > 100
    began = time.monotonic()
    cleared = steer(server, "clear", shared)["replicas"]
    assert time.monotonic() - began < 15
    assert sum(each["removed_now"] + each["removed_later"] for each in cleared) == held
    assert snapshots(server) == 0
    found = server.client.post(f"/v1/xavier/{shared}/lookup", json={"prompt": text(0, 2000)})
    assert [each["gpu"] + each["cpu"] + each["peer"] for each in found.json()["replicas"]] == [0, 0]


@pytest.mark.slow
def test_busy_engines_clear_between_two_steps(server: Xinference, shared: str) -> None:
    def write() -> httpx.Response:
        return server.complete(shared, text(62, 1000), max_tokens=1500)

    with ThreadPoolExecutor(2) as pool:
        written = [pool.submit(write) for _ in range(2)]
        wait_until(lambda: snapshots(server) > 0, 60, server.tail)
        answered = server.client.post(f"/v1/xavier/{shared}/clear")
        assert not any(each.done() for each in written)
        assert all(each["problem"] is None for each in answered.json()["replicas"])
        assert all(each.result().json()["usage"]["completion_tokens"] == 1500 for each in written)
    assert snapshots(server) == 0, "nor are tails of what was cleared stored"


def test_budgets_change_while_idle_and_answers_do_not(
    server: Xinference, shared: str, plain: tuple[dict[str, object], Said]
) -> None:
    _, said = plain
    for number in range(PROMPTS):
        assert answer(server, shared, number) == said.answers[number]
    wait_until(lambda: not any(jobs(server)), 30, server.tail)
    sizes = ("--xavier-gpu-budget", "2MiB", "--xavier-cpu-budget", "128MiB")
    for replica in steer(server, "resize", shared, *sizes)["replicas"]:
        assert replica["gpu"]["state"] == replica["cpu"]["state"] == "done"
        assert replica["gpu"]["budget_bytes"] == 2 * 2**20
        assert replica["gpu"]["rows"] * 64 == replica["cpu"]["rows"]
    for replica in replicas(server):
        tiers = replica["stats"]["tiers"]
        assert tiers["gpu"]["snapshots"] <= tiers["gpu"]["rows"]
    demoted = counter(server, "demotions")
    assert demoted > 0
    for number in range(PROMPTS):
        assert answer(server, shared, number) == said.answers[number]
    steer(server, "resize", shared, "--xavier-gpu-budget", "32MiB", "--xavier-cpu-budget", "1MiB")
    for number in range(PROMPTS):
        assert answer(server, shared, number) == said.answers[number]
    assert counter(server, "mismatches") == counter(server, "failed_copies") == 0
    refused = server.client.patch(f"/v1/xavier/{shared}/budgets", json={"xavier_gpu_budget": 5})
    assert refused.status_code == 409
    assert "xavier_gpu_budget=5 is below one row" in refused.json()["detail"]


@pytest.mark.slow
def test_paused_stores_keep_what_is_there(server: Xinference, shared: str) -> None:
    assert [each["paused"] for each in steer(server, "pause", shared)["replicas"]] == [True, True]
    held = snapshots(server)
    for _ in range(2):
        ask(server, shared, text(70, 1000))
    assert snapshots(server) == held
    assert all(each["stats"]["stores_paused"] for each in replicas(server))
    steer(server, "resume", shared)
    shown = server.run(BIN / "xinference-xavier", "stats", shared, "--endpoint", server.url)
    assert shown.returncode == 0
    assert "GPU" in shown.stdout
    assert "paused" not in shown.stdout
