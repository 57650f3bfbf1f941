"""What a replica lets its peers read: leases, asked for by actors calls.

Covers: slicing, so that the scheduler thread never finds the lock held for long, and expiry. Does
not cover the rules of a lease (``policy/leases.py``) or who may ask (``replica.py``). Runs on the
bridge's event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from xinference_xavier.policy.leases import Leases

#: Keys pinned under one hold of the lock: about 0.1 ms.
KEYS_PER_SLICE = 256
#: How often leases are looked over.
EXPIRY_SECONDS = 0.25


class Lender:
    """Leases of one replica's rows.

    ``leases`` gives the current ones, under ``lock``: the scheduler thread changes the same rows.
    """

    def __init__(self, lock: threading.Lock, leases: Callable[[], Leases]) -> None:
        self._lock = lock
        self._leases = leases

    async def lease(
        self, peer: str, keys: Sequence[bytes], ttl_seconds: float
    ) -> tuple[int, list[int]]:
        """Pin ``keys`` for ``peer``: the lease's number, and per key a location, ``NOWHERE`` or
        ``NOT_NOW``."""
        with self._lock:
            lease_id = self._leases().open(peer, time.monotonic(), ttl_seconds)
        found: list[int] = []
        try:
            for start in range(0, len(keys), KEYS_PER_SLICE):
                with self._lock:
                    found += self._leases().extend(lease_id, keys[start : start + KEYS_PER_SLICE])
                await asyncio.sleep(0)
        except asyncio.CancelledError:  # the peer waits no longer: nobody would release it
            with self._lock:
                self._leases().release(lease_id)
            raise
        return lease_id, found

    async def release(self, lease_id: int) -> bool:
        """End a lease; whether its rows held their bytes until now."""
        with self._lock:
            self._leases().expire(time.monotonic(), at_once=False)
            held = self._leases().release(lease_id, at_once=False)
        await self._give_back()
        return held

    async def _give_back(self) -> None:
        while True:
            with self._lock:
                if not self._leases().give_back(KEYS_PER_SLICE):
                    return
            await asyncio.sleep(0)

    async def expire_forever(self) -> None:
        """End leases that are over, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            with self._lock:
                self._leases().expire(time.monotonic(), at_once=False)
            await self._give_back()
