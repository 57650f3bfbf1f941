"""One replica's face to the cluster: statistics for the API, leases for its peers.

Covers: the actor. Does not cover: its pool and its heartbeats (``bridge.py``), what the
statistics hold (the engine layer), the rules of leases (``policy/leases.py``). Runs on the
bridge's event loop in vLLM's EngineCore process; nothing here waits for the scheduler thread.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import xoscar as xo

from xinference_xavier.types import OptionError

REPLICA_UID = "xinference_xavier_replica"

StatsCallable = Callable[[], dict[str, Any]]


class ShareFace(Protocol):
    """What peers and the tracker may ask of a replica that shares (``sharing.Sharing``)."""

    token: str
    memories: Sequence[Any]

    async def lease(
        self, peer: str, keys: Sequence[bytes], ttl_seconds: float
    ) -> tuple[int, list[int]]: ...

    async def release(self, lease_id: int) -> bool: ...

    async def checksums(self, locations: bytes) -> list[Any] | None: ...

    async def hear(self, batches: Sequence[Any]) -> None: ...


class SteerFace(Protocol):
    """What an operator may ask of a replica (``engine.steering.Steering``)."""

    async def clear(self) -> dict[str, int]: ...

    async def resize(
        self, gpu_bytes: int | None, cpu_bytes: int | None, wait_seconds: float
    ) -> dict[str, Any]: ...

    async def lookup(self, tokens: Sequence[int], cache_salt: str | None) -> dict[str, int]: ...

    async def pause_stores(self, paused: bool) -> dict[str, bool]: ...

    async def doubt(self, keys: Sequence[bytes]) -> int: ...


class ReplicaActor(xo.StatelessActor):
    """Answers for one replica.

    ``stats`` is called on the pool's event loop, beside the scheduler thread: it must be quick
    and safe to call from another thread. ``share`` gives the sharing side, None while there is
    none. ``steer`` carries out what an operator asks. That takes no token: users are told apart by
    Xinference's API, and whoever reaches this port is trusted (``docs/sharing.md``).
    """

    def __init__(
        self,
        stats: StatsCallable,
        share: Callable[[], ShareFace | None] = lambda: None,
        steer: SteerFace | None = None,
    ) -> None:
        super().__init__()
        self._stats = stats
        self._steer = steer
        self._share = share

    @classmethod
    def default_uid(cls) -> str:
        return REPLICA_UID

    def stats(self) -> dict[str, Any]:
        return self._stats()

    def meet(self, token: str) -> list[Any]:
        """Each rank's memory, for a peer of the same namespace and launch secret.

        Raises:
            PermissionError: the token is another one, or this replica does not share.
        """
        return list(self._admit(token).memories)

    async def lease(
        self, token: str, peer: str, keys: bytes, key_bytes: int, ttl_seconds: float
    ) -> tuple[int, list[int]]:
        """Keep rows for ``peer`` until ``release`` or for ``ttl_seconds``.

        ``keys`` are ``key_bytes`` long each. Returns the lease's number and, per key, its location,
        ``NOWHERE`` or ``NOT_NOW`` (``policy/leases.py``). Raises as ``meet``.
        """
        face = self._admit(token)
        return await face.lease(peer, _split(keys, key_bytes), ttl_seconds)

    async def release(self, token: str, lease_id: int) -> bool:
        """End a lease; True if its rows held their bytes until now. Raises as ``meet``."""
        return await self._admit(token).release(lease_id)

    async def checksums(self, token: str, locations: bytes) -> list[Any] | None:
        """What each rank knows of rows under a lease, int64 locations; None while this replica
        checks nothing. Raises as ``meet``."""
        return await self._admit(token).checksums(locations)

    async def doubt(self, token: str, keys: bytes, key_bytes: int) -> int:
        """A peer read other bytes than were stored under these keys: serve them no more. How many
        were forgotten. Raises as ``meet``."""
        self._admit(token)
        return await self._steering().doubt(_split(keys, key_bytes))

    async def hear(self, token: str, batches: Sequence[Any]) -> None:
        """What peers hold, from the tracker. Raises as ``meet``."""
        await self._admit(token).hear(batches)

    async def clear(self) -> dict[str, int]:
        """As ``SteerFace``; so are the next three. Raise ``OptionError`` for what cannot be."""
        return await self._steering().clear()

    async def resize(
        self, gpu_bytes: int | None, cpu_bytes: int | None, wait_seconds: float
    ) -> dict[str, Any]:
        return await self._steering().resize(gpu_bytes, cpu_bytes, wait_seconds)

    async def lookup(self, tokens: Sequence[int], cache_salt: str | None = None) -> dict[str, int]:
        return await self._steering().lookup(tokens, cache_salt)

    async def pause_stores(self, paused: bool) -> dict[str, bool]:
        return await self._steering().pause_stores(paused)

    def _steering(self) -> SteerFace:
        if self._steer is None:
            raise OptionError("This replica cannot be steered.")
        return self._steer

    def _admit(self, token: str) -> ShareFace:
        face = self._share()
        if face is None or not hmac.compare_digest(token, face.token):
            raise PermissionError("this replica does not share with that namespace")
        return face


def _split(keys: bytes, key_bytes: int) -> list[bytes]:
    return [keys[start : start + key_bytes] for start in range(0, len(keys), key_bytes)]
