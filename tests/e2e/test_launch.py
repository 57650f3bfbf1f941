"""Launches through Xinference's own command line, and what its REST API then shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from conversation import Said
from server import Xinference, wait_until

SWITCH = "--enable-xavier-gpu"
#: Keeps Xinference from installing a vLLM of its own into the model's environment.
INSTALL_NOTHING = ("--virtual-env-package", 'vllm ; python_version < "3"')


def test_launched_model_is_shown_with_its_options_and_tiers(
    server: Xinference, cached_model: str
) -> None:
    replica = server.replica(cached_model)
    assert (replica["state"], replica["stale"]) == ("running", False)
    assert replica["options"]["xavier_gpu_budget"] == 16 * 1024**2
    tiers = replica["stats"]["tiers"]
    assert tiers["gpu"]["budget_bytes"] == 16 * 1024**2
    assert tiers["cpu"]["budget_bytes"] == 64 * 1024**2
    everything = server.client.get("/v1/xavier").json()
    assert cached_model in [model["model_uid"] for model in everything["models"]]


def test_every_prompt_token_is_accounted_for(server: Xinference, cached_model: str) -> None:
    before = server.stats(cached_model)["counters"]
    for _ in range(2):
        server.complete(cached_model, "accounted " * 100, max_tokens=4).raise_for_status()
    after = server.stats(cached_model)["counters"]
    grown = {name: after[name] - before[name] for name in after if name.startswith("tokens_")}
    assert grown["tokens_prompt"] == 2 * 1000
    assert sum(grown.values()) == 2 * grown["tokens_prompt"]


def test_unknown_model_is_not_found(server: Xinference) -> None:
    answer = server.client.get("/v1/xavier/no-such-model")
    assert answer.status_code == 404
    assert "no-such-model" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((SWITCH, "--xavier-gpu-budget", "4 furlongs"), "4 furlongs"),
        ((SWITCH, "--xavier-gpu-bugdet", "1GiB"), "Did you mean xavier_gpu_budget"),
        ((SWITCH, "--enable_prefix_caching", "false"), "enable_prefix_caching"),
        (("--xavier-gpu-budget", "1GiB"), "enable_xavier_gpu"),
    ],
)
def test_bad_launch_ends_with_a_sentence_and_makes_nothing(
    server: Xinference, tiny_model: Path, flags: tuple[str, ...], words: str
) -> None:
    refused = server.launch("refused", tiny_model, *flags)
    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
    assert server.client.get("/v1/xavier/refused").status_code == 404


def test_launch_without_the_switch_has_no_cache(plain: tuple[dict[str, Any], Said]) -> None:
    view, said = plain
    assert (view["enabled"], view["replicas"]) == (False, [])
    assert "enable_xavier_gpu" in view["detail"]
    assert all(said.answers)


@pytest.mark.slow
def test_model_with_an_environment_of_its_own(server: Xinference, tiny_model: Path) -> None:
    flags = (SWITCH, "--xavier-gpu-budget", "16MiB", "--xavier-cpu-budget", "16MiB")
    launched = server.launch(
        "own-env", tiny_model, *flags, "--enable-virtual-env", *INSTALL_NOTHING
    )
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("own-env")
    assert list((server.home / "virtualenv").rglob("_xinference_parent.pth"))
    assert server.stats("own-env")["tiers"]["gpu"]["rows"] > 0

    server.terminate("own-env")
    # The engine may be killed without a goodbye: its entry is hidden, not merely expired.
    wait_until(lambda: server.client.get("/v1/xavier/own-env").status_code == 404, 20, server.tail)


def test_cache_routes_need_a_credential(secured_server: Xinference) -> None:
    for path in ("/v1/xavier", "/v1/xavier/m"):
        assert httpx.get(secured_server.url + path, timeout=30).status_code == 401
    assert secured_server.client.get("/v1/xavier").json() == {"models": []}
    assert secured_server.client.get("/v1/xavier/m").status_code == 404


def test_authentication_precedes_validation(secured_server: Xinference) -> None:
    body = {"model_name": "qwen2.5-instruct", "enable_xavier_gpu": True, "xavier_gpu_budget": "?"}
    anonymous = httpx.post(f"{secured_server.url}/v1/models", json=body, timeout=30)
    assert anonymous.status_code == 401
    known = secured_server.client.post("/v1/models", json=body)
    assert known.status_code == 400
    assert "xavier_gpu_budget" in known.json()["detail"]
