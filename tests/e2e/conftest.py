"""Real servers shared by a run: each is started once, and must leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Xinference

ROOT = Path(__file__).parents[2]

#: Options of the shared cached model: a small device tier, and a host tier of a few prompts.
CACHE_FLAGS = (
    *("--enable-xavier-gpu", "--xavier-gpu-budget", "16MiB"),
    *("--xavier-cpu-budget", "64MiB"),
)


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


def _serve(home: Path, **options: object) -> Iterator[Xinference]:
    server = Xinference(home, **options)  # type: ignore[arg-type]
    yield server
    assert server.stop() == []


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    """A server without authentication."""
    yield from _serve(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def secured_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Xinference]:
    """A server with authentication, whose ``client`` is its first user."""
    yield from _serve(tmp_path_factory.mktemp("secured"), auth=True)


@pytest.fixture(scope="session")
def cached_model(server: Xinference, tiny_model: Path) -> str:
    """Uid of a model with the cache on ``server``, loaded."""
    launched = server.launch("cached", tiny_model, *CACHE_FLAGS)
    assert launched.returncode == 0, launched.stderr
    server.wait_ready("cached")
    return "cached"
