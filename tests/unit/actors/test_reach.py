"""An address that swallows packets holds up nobody else's calls."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xoscar as xo
from pool_process import PoolProcess

from xinference_xavier.actors.outbox import Outbox
from xinference_xavier.actors.peers import Peers
from xinference_xavier.actors.reach import reach
from xinference_xavier.actors.registry import PeerEntry
from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.actors.tracker import TRACKER_UID, find_tracker
from xinference_xavier.host.view import ClusterView

# xoscar leaves client connections to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address whose queue of connections is full: further ones are left without an answer."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def tell(address: str, supervisor: str) -> Any:
    outbox = Outbox(address, "token")
    outbox.put(("member", 0))
    return outbox


def meet(address: str, supervisor: str) -> Any:
    entry = PeerEntry(member="p", model_uid="m", replica=1, address=address, machine="here")
    peers = Peers("token", [], "here")
    peers.update([entry])
    return peers


def look(address: str, supervisor: str) -> Any:
    async def nothing_runs() -> dict[str, Any]:
        return {}

    return asyncio.ensure_future(ClusterView(supervisor, nothing_runs)._ask(address))


def beat(address: str, supervisor: str) -> Any:
    return asyncio.ensure_future(find_tracker(address))


@pytest.mark.parametrize("begin", [tell, meet, look, beat])
def test_others_are_called_meanwhile(
    supervisor: PoolProcess, black_hole: str, begin: Callable[[str, str], Any]
) -> None:
    async def run() -> float:
        tracker = await xo.actor_ref(uid=TRACKER_UID, address=supervisor.address)
        await tracker.replicas()  # the first call of a process takes long
        asked = begin(black_hole, supervisor.address)  # kept: tasks may not be collected
        await asyncio.sleep(0.2)  # it is connecting now
        began = time.monotonic()
        assert pickle.loads(await tracker.replicas()) == []
        took = time.monotonic() - began
        del asked
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return took

    assert asyncio.run(run()) < 2.0  # the shortest of the time limits is 3 seconds


def test_nobody_listens_or_no_such_actor(supervisor: PoolProcess) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(reach(REPLICA_UID, free))
    with pytest.raises(xo.ActorNotExist):
        asyncio.run(reach(REPLICA_UID, supervisor.address))
