"""One rank among its peers: its slabs registered for reading, and the actor that reads theirs.

Covers: opening and closing both. Does not cover the transfer (``storage/transport.py``) or the
actor (``actors/tier.py``). Opened on the worker's main thread before the first step.
"""

from __future__ import annotations

import logging

from xinference_xavier.actors.tier import TierAddress, TierServer
from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.gates import Gates
from xinference_xavier.storage.row_check import RowCheck
from xinference_xavier.storage.slab import Slab
from xinference_xavier.storage.transport import RankMemory, Transport
from xinference_xavier.types import TransferError

logger = logging.getLogger(__name__)


class RankShare:
    """What a rank needs to share; ``open`` makes one.

    Raises:
        TransferError: NIXL is missing, or registering the memory or starting the pool failed.
    """

    def __init__(
        self,
        device_slab: Slab | None,
        host_slab: Slab | None,
        rows: RowCheck,
        faults: Faults | None,
    ) -> None:
        self.gates = Gates()
        self._transport = Transport(device_slab, host_slab, faults=faults)
        self._server = TierServer(self._transport, self.gates, rows)
        try:
            self.memory: RankMemory = self._transport.memory()
            self.address: TierAddress = self._server.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop reading and being read, in bounded time."""
        self._server.close()
        self._transport.close()


def open_share(
    device_slab: Slab | None,
    host_slab: Slab | None,
    rows: RowCheck,
    faults: Faults | None = None,
) -> tuple[RankShare | None, str | None]:
    """The rank's share, or the sentence why it has none. Never raises: the cache works without."""
    try:
        return RankShare(device_slab, host_slab, rows, faults), None
    except Exception as error:
        known = isinstance(error, TransferError)
        logger.warning("xavier: this rank shares nothing: %s", error, exc_info=not known)
        return None, str(error) if known else f"{type(error).__name__}: {error}"
