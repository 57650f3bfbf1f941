"""Two replicas of one launch: what one has computed is a hit on the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import PROMPTS, Said, answer, ask, text
from server import Xinference, flags, wait_until

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
