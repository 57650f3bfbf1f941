"""Finding an actor without holding up the calls to all others.

xoscar connects under a lock that every call of the same thread takes. An address that swallows
packets (a firewall, a machine that is off) would thus hold up the thread's calls to everybody,
among them Xinference's own in the supervisor. Such an address is found out here, beside the lock.
Any event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import xoscar as xo

from .hosts import host_of


async def reach(uid: str, address: str) -> xo.ActorRefType[Any]:
    """Reference to the actor ``uid`` of the pool at ``address``; as long as the caller waits.

    Raises:
        OSError: nobody listens there.
        xoscar.ActorNotExist: the pool has no such actor.
    """
    await _knock(address)
    return await xo.actor_ref(uid=uid, address=address)


async def _knock(address: str) -> None:
    """Return once somebody accepts a connection."""
    host = host_of(address)
    if host is None or "://" in address:  # not TCP
        return
    _, writer = await asyncio.open_connection(host.strip("[]"), int(address.rpartition(":")[2]))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
