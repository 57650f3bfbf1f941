"""Private symbols of Xinference: all listed in one file, all there, clear words when not."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import xinference_xavier
from xinference_xavier.host import compat
from xinference_xavier.host.compat import SYMBOLS, HostChangedError, HostSymbol

HOST = Path(xinference_xavier.__file__).parent / "host"


def test_every_symbol_exists_in_the_installed_host() -> None:
    assert [str(symbol) for symbol in compat.missing()] == []


def test_every_symbol_says_why() -> None:
    assert all(symbol.why for symbol in SYMBOLS)
    assert len({str(symbol) for symbol in SYMBOLS}) == len(SYMBOLS)


class Api:
    listed = 1

    def __init__(self) -> None:
        self._app = object()

    def later(self) -> None:
        self._router = object()


def fake_host() -> ModuleType:
    module = ModuleType("fake_host")
    module.Api = Api  # type: ignore[attr-defined]
    return module


def test_symbols_that_are_gone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        HostSymbol("fake_host", "Api", "w"),
        HostSymbol("fake_host", "Api.listed", "w"),
        HostSymbol("fake_host", "Api._app", "w", instance=True),
        HostSymbol("fake_host", "Api._router", "w", instance=True),
    ]
    gone = [
        HostSymbol("fake_host", "Other", "w"),
        HostSymbol("fake_host", "Other.deep", "w"),
        HostSymbol("fake_host", "Api._app", "w"),
        HostSymbol("fake_host", "Api._gone", "w", instance=True),
    ]
    monkeypatch.setattr(compat, "SYMBOLS", (*there, *gone))
    assert compat.missing_in(fake_host()) == gone
    assert compat.missing_in(ModuleType("another")) == []
    monkeypatch.setattr(compat, "SYMBOLS", (HostSymbol("no_such_host", "x", "w"),))
    assert compat.missing() == list(compat.SYMBOLS)


def test_instances_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols = tuple(
        HostSymbol(__name__, f"Api.{name}", "w", instance=True) for name in ("_app", "_router")
    )
    monkeypatch.setattr(compat, "SYMBOLS", symbols)
    api = Api()
    assert compat.missing_on(api) == [symbols[1]]
    api.later()
    assert compat.missing_on(api) == []


def test_the_message_names_symbol_use_and_remedy() -> None:
    message = str(HostChangedError([HostSymbol("host.api", "App._router", "joined by routes")]))
    assert "host.api:App._router (joined by routes)" in message
    assert "xinference-xavier doctor" in message


def touched(path: Path) -> set[str]:
    """Names imported from the host, and private attributes of objects that are not ours.

    A private name counts as ours when the file itself defines or assigns it on ``self``.
    """
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "xinference":
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own |= {target.attr for target in targets if isinstance(target, ast.Attribute)}
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            dunder = node.attr.startswith("__") and node.attr != "__init__"
            if not dunder and node.attr not in own:
                found.add(node.attr)
    return found


@pytest.mark.parametrize(
    "path", sorted(HOST.rglob("*.py")), ids=lambda path: str(path.relative_to(HOST))
)
def test_what_the_host_layer_touches_is_listed(path: Path) -> None:
    listed = {str(symbol) for symbol in SYMBOLS}
    listed |= {symbol.path.rpartition(".")[2] for symbol in SYMBOLS}
    assert touched(path) - listed == set()
