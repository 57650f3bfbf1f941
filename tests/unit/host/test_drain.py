"""What the host's server says when it begins to drain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from xinference_xavier.host import drain


class Connection:
    """One connection of uvicorn's: the scope of its last request."""

    def __init__(self, path: str) -> None:
        self.scope = {"path": path}
        self.told = False

    def shutdown(self) -> None:
        self.told = True


def test_a_drain_closes_the_panels_connections_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drained: list[str] = []

    class HostedServer:
        def __init__(self, *connections: Connection) -> None:
            self.server_state = SimpleNamespace(connections=set(connections))

        def begin_drain(self) -> None:
            drained.append("host")

    module = SimpleNamespace(HostedServer=HostedServer)
    monkeypatch.setattr(drain, "_callbacks", [lambda: drained.append("ours")])
    drain.on_api_worker(module)
    drain.on_api_worker(module)
    panel, other = Connection("/xavier/gradio_api/x"), Connection("/v1/models")
    HostedServer(panel, other).begin_drain()
    assert drained == ["host", "ours"]
    assert (panel.told, other.told) == (True, False)
