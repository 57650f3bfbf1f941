"""Hosts and machines; sockets and /proc are this machine's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from xinference_xavier.actors import hosts


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:9", "127.0.0.1"),
        ("gpu-3.lan:9", "gpu-3.lan"),
        ("ucx://10.0.0.2:9", "10.0.0.2"),
        (":::9", "::"),
        ("[::1]:9", "[::1]"),
        ("", None),
        (None, None),
    ],
)
def test_host_of_an_address(address: str | None, host: str | None) -> None:
    assert hosts.host_of(address) == host


@pytest.mark.parametrize(
    ("host", "loopback", "unspecified"),
    [
        ("127.0.0.1", True, False),
        ("127.0.0.3", True, False),
        ("localhost", True, False),
        ("::1", True, False),
        ("[::1]", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.2", False, False),
        ("127.example.com", False, False),
        ("", False, False),
    ],
)
def test_kinds_of_hosts(host: str, loopback: bool, unspecified: bool) -> None:
    assert hosts.is_loopback(host) is loopback
    assert hosts.is_unspecified(host) is unspecified


@pytest.mark.parametrize(
    "host", [None, "0.0.0.0", "127.0.0.1", "localhost", "no-such-host.invalid"]
)
def test_interface_towards_this_machine_is_loopback(host: str | None) -> None:
    assert hosts.is_loopback(hosts.interface_towards(host))


def test_interface_towards_another_machine_can_be_listened_on() -> None:
    """192.0.2.1 is nobody's (RFC 5737); with no route to it, loopback is the answer."""
    with socket.socket() as listener:
        listener.bind((hosts.interface_towards("192.0.2.1"), 0))


def test_processes_of_one_network_have_one_machine_id() -> None:
    code = "from xinference_xavier.actors.hosts import machine_id as m; print(m())"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout.strip() == hosts.machine_id() != ""


def test_another_network_namespace_is_another_machine() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.call([unshare, "-rn", "true"], stderr=subprocess.DEVNULL):
        pytest.skip("network namespaces cannot be made here")
    code = "from xinference_xavier.actors.hosts import machine_id as m; print(m())"
    child = subprocess.run(
        [unshare, "-rn", sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    there = child.stdout.strip()
    assert there != hosts.machine_id()
    assert there.split("/")[0] == hosts.machine_id().split("/")[0]


def test_a_system_without_proc_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> os.stat_result:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "stat", missing)
    assert hosts.machine_id() == socket.gethostname()
