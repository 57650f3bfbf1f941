"""What the policy reads off a key: its KV group, and the order in which a prefix is used up."""

from __future__ import annotations

from collections.abc import Sequence


def tails_first(keys: Sequence[bytes]) -> Sequence[int]:
    """Positions of ``keys``, which are in order within each KV group, from the tails to the heads.

    Groups take turns: a prefix is of use only with its blocks of every group.
    """
    if not keys or group_of(keys[0]) == group_of(keys[-1]):  # keys come ordered by group
        return range(len(keys) - 1, -1, -1)
    seen: dict[int, int] = {}
    depths = []
    for key in keys:
        group = group_of(key)
        depths.append(seen.get(group, 0))
        seen[group] = depths[-1] + 1
    return sorted(range(len(keys)), key=depths.__getitem__, reverse=True)


def group_of(key: bytes) -> int:
    """KV group of a key: its last four bytes, big-endian (vLLM's ``make_offload_key``)."""
    return int.from_bytes(key[-4:], "big")
