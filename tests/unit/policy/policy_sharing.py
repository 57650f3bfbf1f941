"""Keys by number, and the batches of a member ``m`` made from them."""

from __future__ import annotations

import hashlib

from xinference_xavier.policy.directory import Batch
from xinference_xavier.policy.fingerprints import fingerprints, pack


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def packed(*numbers: int) -> bytes:
    return pack(fingerprints(keys(*numbers)))


def start(number: int = 0, *added: int) -> Batch:
    return Batch("m", number, True, packed(*added), b"")


def change(number: int, added: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> Batch:
    return Batch("m", number, False, packed(*added), packed(*removed))
