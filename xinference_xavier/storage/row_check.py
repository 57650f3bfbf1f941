"""Checksums of rows that come from a peer: what was stored there is what arrived here.

Covers: telling the checksums of rows, and comparing rows with a peer's. Does not cover copies
between KV blocks and rows (``self_check.py``, which keeps the checksums of both) or how checksums
travel (``actors``). Used by the rank's tier actor, on its event loop and on helper threads of it,
beside the copy thread.
"""

from __future__ import annotations

from xinference_xavier.storage.jobs import Indexes
from xinference_xavier.storage.rowmap import RowMap
from xinference_xavier.storage.self_check import SelfCheck, Sum

#: What a rank knows of rows: how checksums are made there, and each row's (None: not known).
Checksums = tuple[int, list[Sum | None]]


class RowCheck:
    """The rows of one rank beside their checksums; ``check`` is None while the self-check is off.

    The checksum of a row is taken over the same pages, in the same order, as that of a KV block.
    """

    def __init__(self, rows: RowMap, check: SelfCheck | None) -> None:
        self._rows = rows
        self._check = check

    def forget(self, locations: Indexes) -> None:
        """Rows int64 ``[n]`` that get content from elsewhere: no checksum holds. Any thread."""
        if self._check is not None:
            self._check.forget(locations)

    def tell(self, locations: Indexes) -> Checksums | None:
        """What is known of rows int64 ``[n]``; None while the self-check is off. Any thread."""
        if self._check is None:
            return None
        return self._check.scheme, self._check.known(locations)

    def wrong(self, locations: Indexes, told: Checksums) -> list[int]:
        """Positions of ``locations`` whose row is not what its owner stored.

        What is right is remembered, for loads and for other peers. Nothing is compared while the
        self-check is off here, or if the owner makes its checksums in another way. Any thread.

        Raises:
            IndexError: a location is in no tier.
        """
        scheme, sums = told
        if self._check is None or scheme != self._check.scheme:
            return []
        known = [(i, known) for i, known in enumerate(sums[: len(locations)]) if known is not None]
        memory, rows = self._rows.resolve(locations)
        wrong = []
        for group in {known[0] for _, known in known}:
            for number in set(memory.tolist()):
                part = [i for i, known in known if known[0] == group and memory[i] == number]
                found = self._check.of_rows(self._rows.memories[number], rows[part], group)
                pairs = zip(part, found, strict=True)
                wrong += [i for i, checksum in pairs if (group, checksum) != sums[i]]
        self._check.note(len(known), len(wrong), "rows read from a peer")
        right = [(i, known) for i, known in known if i not in set(wrong)]
        self._check.learn([(int(locations[i]), known) for i, known in right])
        return sorted(wrong)

    def close(self) -> None:
        """Let go of the rows' memory."""
        self._rows, self._check = RowMap(None, None), None
