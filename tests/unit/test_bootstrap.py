"""The import finder: runs hooks after host modules, never breaks them, costs others nothing."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from xinference_xavier.host import bootstrap, compat
from xinference_xavier.host.bootstrap import DISABLE_VARIABLE, HOOKS, HookFinder


class Seen:
    """What the hook of a test was called with."""

    modules: list[tuple[str, bool]]


@pytest.fixture
def seen() -> Seen:
    """The hook below notes here which module it got, and whether that module's body had run."""
    Seen.modules = []
    return Seen


def note(module: ModuleType) -> None:
    Seen.modules.append((module.__name__, hasattr(module, "LAST_LINE")))


def fail(module: ModuleType) -> None:
    raise KeyError("the host has changed")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package ``fake_host`` with one module, and a clean import state."""
    package = tmp_path / "fake_host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "routers.py").write_text("LAST_LINE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(bootstrap, "outcomes", {})
    yield package
    for name in [name for name in sys.modules if name.startswith("fake_host")]:
        del sys.modules[name]


def hook(function: str) -> HookFinder:
    finder = HookFinder({"fake_host.routers": function})
    sys.meta_path.insert(0, finder)
    return finder


def test_a_hook_runs_once_after_the_modules_body(host: Path, seen: Seen) -> None:
    hook(f"{__name__}:note")
    module = importlib.import_module("fake_host.routers")
    importlib.import_module("fake_host.routers")
    assert seen.modules == [("fake_host.routers", True)]
    assert module.__file__ == str(host / "routers.py")
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert bootstrap.outcomes == {"fake_host.routers": "active"}


def test_a_failing_hook_is_logged_once_and_the_import_succeeds(
    host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook(f"{__name__}:fail")
    with caplog.at_level(logging.WARNING):
        assert importlib.import_module("fake_host.routers").LAST_LINE == 1
    [record] = caplog.records
    assert "not active in fake_host.routers" in record.getMessage()
    assert "the host has changed" in record.getMessage()
    assert "xinference-xavier doctor" in record.getMessage()
    assert bootstrap.outcomes["fake_host.routers"].startswith("KeyError")


@pytest.mark.parametrize("function", ["no_such_module:f", "json:no_such_function", "json"])
def test_a_hook_that_is_not_there_is_a_failing_hook(host: Path, function: str) -> None:
    hook(function)
    assert importlib.import_module("fake_host.routers").LAST_LINE == 1
    assert bootstrap.outcomes["fake_host.routers"] != "active"


def test_a_hook_stays_inactive_when_a_host_symbol_is_gone(
    host: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = compat.HostSymbol("fake_host.routers", "register_all_routes", "wrapped")
    monkeypatch.setattr(compat, "SYMBOLS", (gone,))
    hook(f"{__name__}:note")
    importlib.import_module("fake_host.routers")
    assert seen.modules == []
    assert "fake_host.routers:register_all_routes (wrapped)" in caplog.text


def test_an_error_of_the_host_module_is_the_hosts_own(host: Path, seen: Seen) -> None:
    (host / "routers.py").write_text("raise RuntimeError('broken host')\n")
    hook(f"{__name__}:note")
    with pytest.raises(RuntimeError, match="broken host"):
        importlib.import_module("fake_host.routers")
    assert seen.modules == []


def test_a_missing_host_module_stays_missing(host: Path) -> None:
    hook(f"{__name__}:note")
    (host / "routers.py").unlink()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fake_host.routers")


def test_a_loader_that_cannot_be_wrapped_leaves_the_host_alone(host: Path, seen: Seen) -> None:
    class SlottedLoader:
        __slots__ = ()

        def create_module(self, spec: object) -> None:
            return None

        def exec_module(self, module: ModuleType) -> None:
            module.LAST_LINE = 2  # type: ignore[attr-defined]

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name == "fake_host.routers":
                return importlib.machinery.ModuleSpec(name, SlottedLoader())  # type: ignore[arg-type]
            return None

    hook(f"{__name__}:note")
    sys.meta_path.insert(1, Finder)  # type: ignore[arg-type]
    assert importlib.import_module("fake_host.routers").LAST_LINE == 2
    assert seen.modules == []
    assert "SlottedLoader" in bootstrap.outcomes["fake_host.routers"]


def test_other_imports_pass_by(host: Path) -> None:
    finder = hook(f"{__name__}:note")
    assert finder.find_spec("json") is None
    assert finder.find_spec("fake_host") is None


def test_installing_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    others = [f for f in sys.meta_path if not isinstance(f, HookFinder)]
    monkeypatch.setattr(sys, "meta_path", list(others))
    bootstrap.install()
    bootstrap.install()
    assert isinstance(sys.meta_path[0], HookFinder)
    assert sys.meta_path[1:] == others


@pytest.mark.parametrize(("value", "installed"), [("1", False), ("yes", False), ("0", True)])
def test_the_switch_off_variable(
    value: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, value)
    monkeypatch.setattr(sys, "meta_path", [])
    bootstrap.install()
    assert bool(sys.meta_path) is installed


def test_hooks_name_functions_that_exist() -> None:
    for target in HOOKS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), target


REPORT = """
import sys
{before}
print(sorted(m for m in sys.modules if m.partition(".")[0] == "xinference_xavier"))
print(any(type(f).__name__ == "HookFinder" for f in sys.meta_path))
"""


def report(before: str, **environment: str) -> list[str]:
    """Our loaded modules and whether the finder is there, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(before=before)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-2:]


def test_an_interpreter_without_xinference_loads_nothing_of_ours() -> None:
    assert report("import json, asyncio, urllib.request") == ["[]", "False"]


def test_importing_xinference_installs_the_finder() -> None:
    modules, installed = report("import xinference")
    assert installed == "True"
    assert "xinference_xavier.host.bootstrap" in modules
    assert "xinference_xavier.config" not in modules


def test_disabled_everything_stays_away() -> None:
    modules, installed = report("import xinference.deploy.cmdline", **{DISABLE_VARIABLE: "1"})
    assert installed == "False"
    assert "xinference_xavier.host.cli" not in modules
