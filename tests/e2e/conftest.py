"""Real servers shared by a run: each is started once, and must leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import start_chromium
from conversation import Said, converse
from playwright.sync_api import Browser
from server import ENGINE, ROOT, Xinference, flags

#: Of the shared cached model: an engine that forgets all but two of the conversation's prompts, a
#: device tier that holds four of them (256 rows) and a host tier for all; every copy is checked.
CACHED_ENGINE = {**ENGINE, "num_gpu_blocks_override": 136, "xavier_self_check": 1}
CACHED_BUDGETS = {"GPU_BUDGET": "16MiB", "CPU_BUDGET": "64MiB"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.host)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random fp32 Qwen2 whose tokens are bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    script = ROOT / "examples" / "tiny_model.py"
    subprocess.run([sys.executable, script, "--size", "tiny", path], check=True, timeout=120)
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A real browser; fails, and never skips, where there is none."""
    with start_chromium() as browser:
        yield browser


def _serve(home: Path, **options: object) -> Iterator[Xinference]:
    server = Xinference(home, **options)  # type: ignore[arg-type]
    yield server
    assert server.stop() == []


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    """A server without authentication."""
    yield from _serve(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def secured_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    """A server with authentication, whose ``client`` is its first user."""
    yield from _serve(tmp_path_factory.mktemp("secured"), auth=True)


@pytest.fixture(scope="package")
def cached_model(server: Xinference, tiny_model: Path) -> str:
    """Uid of a model with the cache on ``server``, loaded."""
    launched = server.run_example(
        "launch_cli.sh", "cached", tiny_model, *flags(CACHED_ENGINE), **CACHED_BUDGETS
    )
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("cached")
    return "cached"


@pytest.fixture(scope="package")
def plain(server: Xinference, tiny_model: Path) -> tuple[dict[str, object], Said]:
    """A launch without the cache, over by now: its view by our API, and what it answered."""
    # Without the cache nothing turns the host's count of GPUs, none, into one rank.
    launched = server.launch("plain", tiny_model, "--tensor_parallel_size", "1")
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("plain")
    view = server.client.get("/v1/xavier/plain").json()
    said = converse(server, "plain")
    server.terminate("plain")
    return view, said
