"""Plain data shared by every layer: tiers, locations, copy jobs' kinds, errors.

Imports the standard library only, so that the policy stays free of torch and vLLM.
"""

from __future__ import annotations

from enum import Enum, IntEnum

#: A location that names no row: the block is gone. It is below every host location.
NOWHERE = -(2**62)


class Tier(IntEnum):
    """Where a snapshot's bytes lie. On vLLM's CPU build the GPU tier is RAM too."""

    GPU = 0
    CPU = 1


def host_location(row: int) -> int:
    """Location of host row ``row``; device row ``r`` is its own location."""
    return ~row


def tier_of(location: int) -> Tier:
    """Tier of a location other than ``NOWHERE``."""
    return Tier.GPU if location >= 0 else Tier.CPU


def row_of(location: int) -> int:
    """Row number inside its tier's slab."""
    return location if location >= 0 else ~location


class SkipReason(str, Enum):
    """Why a block offered for storing was not stored. Values are metric labels."""

    #: The oldest evictable rows belong to the request that is being admitted.
    PROMPT_EXCEEDS_TIER = "prompt_exceeds_tier"
    #: Every row is pinned, being written or being moved.
    NO_EVICTABLE_ROW = "no_evictable_row"
    #: An earlier block of the same KV group was skipped, so this one could never be hit.
    PREFIX_NOT_STORED = "prefix_not_stored"
    #: An operator has paused stores.
    PAUSED = "paused"


class XavierError(Exception):
    """Base of every error raised by this package."""


class OptionError(XavierError, ValueError):
    """A launch option is wrong. The message names the option, the value and the remedy."""


class CapacityError(XavierError):
    """A budget does not hold what it must hold."""


class TransferError(XavierError):
    """Rows of a peer could not be read."""


class IntegrityError(XavierError):
    """An invariant of the index does not hold; raised by ``validate`` only."""
