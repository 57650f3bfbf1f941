"""Hosts on which the package is switched off, alone and beside one on which it is on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from server import BIN, Xinference, wait_until

OFF = {"XINFERENCE_XAVIER_DISABLE": "1"}
#: Of our modules, log lines and names in vLLM's arguments; the host has a Xavier of its own.
TRACES = ("xinference_xavier", "xinference-xavier", "xavier_gpu", "XavierGpu")


@pytest.fixture(scope="module")
def disabled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    server = Xinference(tmp_path_factory.mktemp("disabled"), **OFF)
    yield server
    assert server.stop() == []


@pytest.fixture(scope="module", params=["supervisor", "worker"])
def mixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and the log of its side that does not have the package."""
    home = tmp_path_factory.mktemp("mixed")
    supervisor, worker = (OFF, {}) if request.param == "supervisor" else ({}, OFF)
    # The worker would inherit the supervisor's variable.
    on = {"XINFERENCE_XAVIER_DISABLE": "0"}
    cluster = Cluster(home, {**on, **worker}, **supervisor)
    yield cluster, cluster.log if request.param == "supervisor" else cluster.worker_log
    assert cluster.stop() == []


def assert_untouched(log: Path, errors: bool = False) -> None:
    """``errors`` allows those of the host, which logs each question to a loading model as one."""
    text = log.read_text(errors="replace")
    assert text
    assert [line for line in text.splitlines() if any(trace in line for trace in TRACES)] == []
    assert errors or "Traceback" not in text


def launch_plain(server: Xinference, tiny_model: Path) -> None:
    launched = server.launch("plain", tiny_model, "--tensor_parallel_size", "1")
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("plain")
    assert server.complete("plain", "a", max_tokens=4).json()["usage"]["completion_tokens"] == 4
    server.terminate("plain")


def test_disabled_server_has_no_option_and_no_route(
    server: Xinference, disabled_server: Xinference
) -> None:
    shown = [
        one.run(BIN / "xinference", "launch", "--help").stdout for one in (server, disabled_server)
    ]
    assert ["--enable-xavier-gpu" in text for text in shown] == [True, False]
    routes = [
        "/v1/xavier" in one.client.get("/openapi.json").json()["paths"]
        for one in (server, disabled_server)
    ]
    assert routes == [True, False]
    assert "models" not in disabled_server.client.get("/v1/xavier").text
    assert_untouched(disabled_server.log)


@pytest.mark.slow
def test_disabled_server_launches(disabled_server: Xinference, tiny_model: Path) -> None:
    launch_plain(disabled_server, tiny_model)
    assert_untouched(disabled_server.log, errors=True)


@pytest.mark.slow
def test_mixed_cluster_forms(mixed: tuple[Cluster, Path]) -> None:
    cluster, without_us = mixed
    enabled = "/v1/xavier" in cluster.client.get("/openapi.json").json()["paths"]
    assert enabled == (without_us == cluster.worker_log)
    assert_untouched(without_us)


@pytest.mark.slow
def test_mixed_cluster_launches_without_the_switch(
    mixed: tuple[Cluster, Path], tiny_model: Path
) -> None:
    cluster, without_us = mixed
    launch_plain(cluster, tiny_model)
    assert_untouched(without_us, errors=True)


@pytest.mark.slow
def test_a_worker_without_the_package_refuses_the_switch_by_name(
    mixed: tuple[Cluster, Path], tiny_model: Path
) -> None:
    cluster, without_us = mixed
    if without_us != cluster.worker_log:
        pytest.skip("the supervisor is the side without the package")
    cluster.launch("misplaced", tiny_model, "--enable-xavier-gpu")

    def detail() -> str:
        return str(cluster.client.get("/v1/xavier/misplaced").json()["detail"])

    wait_until(lambda: "did not start" in detail(), 120, cluster.tail)
    assert "enable_xavier_gpu" in detail()
