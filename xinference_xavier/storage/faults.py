"""Fault injection for tests: make the n-th copy of a kind raise.

A seam for tests alone, read once when a copier or a transport is made from the environment variable
``XINFERENCE_XAVIER_FAULTS``: a comma-separated list of ``kind:number`` with kind ``store``,
``load``, ``move`` or ``fetch``, counted from 1 per rank, optionally limited to one rank with
``@rankN``, such as ``move:1,load:2@rank1``. Unset, there is no ``Faults`` object and copies pay
nothing.
"""

from __future__ import annotations

import os
import re

ENV_FAULTS = "XINFERENCE_XAVIER_FAULTS"
_ITEM = re.compile(r"(store|load|move|fetch):([1-9][0-9]*)(?:@rank([0-9]+))?")


class InjectedFaultError(RuntimeError):
    """Raised on purpose. A copier does not retry what it made fail."""


class Faults:
    """Raises on chosen copies. Used from the one thread that runs the copies (or reads)."""

    def __init__(self, planned: frozenset[tuple[str, int]]) -> None:
        """``planned``: pairs of kind and number, counted from 1."""
        self._planned = planned
        self._seen: dict[str, int] = {}

    @classmethod
    def from_env(cls, rank: int = 0) -> Faults | None:
        """The faults that the environment plans for ``rank``, or None.

        Raises:
            ValueError: the variable is set and malformed.
        """
        text = os.environ.get(ENV_FAULTS, "").strip()
        return cls.parse(text, rank) if text else None

    @classmethod
    def parse(cls, text: str, rank: int = 0) -> Faults | None:
        """The faults that ``text`` plans for ``rank``, or None; raises as ``from_env``."""
        planned = set()
        for item in text.split(","):
            match = _ITEM.fullmatch(item.strip())
            if match is None:
                raise ValueError(
                    f"{ENV_FAULTS}: {item.strip()!r} is not kind:number or kind:number@rankN "
                    "with kind store, load, move or fetch; correct or unset it"
                )
            kind, number, only_rank = match.groups()
            if only_rank is None or int(only_rank) == rank:
                planned.add((kind, int(number)))
        return cls(frozenset(planned)) if planned else None

    def strike(self, kind: str) -> None:
        """Count one copy of ``kind`` and raise if it is a planned one.

        Raises:
            InjectedFaultError: this copy is to fail.
        """
        number = self._seen[kind] = self._seen.get(kind, 0) + 1
        if (kind, number) in self._planned:
            raise InjectedFaultError(f"injected fault: {kind} number {number}")
