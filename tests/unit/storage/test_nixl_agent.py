"""Whether NIXL is to be had, and that loading it leaves the process as the host made it.

Importing this module must not load NIXL: its functions run in fresh processes.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path

import pytest
from peer_process import in_fresh_process

from xinference_xavier.storage.slab import Slab
from xinference_xavier.storage.transport import Transport, nixl_problem
from xinference_xavier.types import TransferError

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
)


def test_without_nixl_the_reason_and_the_remedy_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert "not installed" in str(nixl_problem())
    with pytest.raises(TransferError, match=r"pip install 'xinference-xavier\[nixl\]'"):
        Transport(None, Slab(1, 4096, "cpu"))
    assert not [t for t in threading.enumerate() if t.name == "xavier-nixl"]


@needs_nixl
def test_a_broken_nixl_is_told_apart_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import nixl._bindings as bindings

    def refuse(*_: object) -> None:
        raise RuntimeError("no such symbol")

    monkeypatch.setattr(bindings, "nixlAgent", refuse)
    assert "RuntimeError: no such symbol" in str(nixl_problem())


def problem_with_plugins_from(folder: Path) -> str | None:
    os.environ["NIXL_PLUGIN_DIR"] = str(folder)
    return nixl_problem()


@needs_nixl
def test_a_nixl_without_ucx_is_no_transport(tmp_path: Path) -> None:
    problem = in_fresh_process(problem_with_plugins_from, tmp_path)
    assert "no UCX backend (found: none)" in problem
    assert "NIXL_PLUGIN_DIR" in problem


def log_and_signals(path: Path) -> tuple[str, bool, set[str]]:
    """Log to a file before and after NIXL starts; the signals handled before and after."""
    logging.getLogger().addHandler(logging.FileHandler(path, mode="w"))
    logging.warning("before")
    slab = Slab(1, 4096, "cpu")
    handled = {caught_signals()}
    transport = Transport(None, slab)
    handled.add(caught_signals())
    transport.close()
    logging.warning("after")
    return path.read_text(), logging.raiseExceptions, handled


def caught_signals() -> str:
    status = Path("/proc/self/status").read_text()
    return next(line for line in status.splitlines() if line.startswith("SigCgt"))


@needs_nixl
def test_logging_and_signals_stay_the_hosts(tmp_path: Path) -> None:
    text, raises, handled = in_fresh_process(log_and_signals, tmp_path / "log")
    assert text == "before\nafter\n"
    assert raises
    assert len(handled) == 1
