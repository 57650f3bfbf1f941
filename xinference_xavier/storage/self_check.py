"""Checksums that prove a loaded block holds the bytes that were stored.

A share of the stored blocks gets a CRC-32 of its group's pages, taken from the KV block itself and
kept by location; it follows moves, and every load of such a row is verified in the KV block it
landed in. Choosing at the store rather than at the load makes a share of 0.001 cost 0.001 on both
sides, since a checksum costs several times a copy. Used from one thread at a time. On CUDA, reading
a block back synchronises with the device: a diagnostic, not for production.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Collection

from xinference_xavier.storage.jobs import CopyJob
from xinference_xavier.storage.layout import RowLayout

logger = logging.getLogger(__name__)


class SelfCheck:
    """Checksums of a share of the rows of one rank, by location."""

    def __init__(self, layout: RowLayout, share: float, seed: int = 0) -> None:
        """``share`` in 0..1 of stores to remember; ``seed`` makes the choice repeatable.

        Raises:
            ValueError: ``share`` is outside 0..1.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"xavier_self_check is a share from 0 to 1, got {share}")
        self._layout = layout
        self._share = share
        self._random = random.Random(seed)
        self._sums: dict[int, int] = {}
        #: Loads verified, and those whose bytes were not the stored ones.
        self.verified = 0
        self.mismatches = 0

    def stored(self, job: CopyJob) -> None:
        """Remember a share of a STORE job's blocks, and that the other rows have new content."""
        blocks, targets = job.blocks.tolist(), job.targets.tolist()
        for group, block, target in zip(job.groups().tolist(), blocks, targets, strict=True):
            self._sums.pop(target, None)
            if self._random.random() < self._share:
                self._sums[target] = self._checksum(group, block)

    def moved(self, job: CopyJob) -> None:
        """Copy what is known of a MOVE job's sources to its targets."""
        known = [self._sums.get(source) for source in job.sources.tolist()]
        for target, checksum in zip(job.targets.tolist(), known, strict=True):
            self._sums.pop(target, None)
            if checksum is not None:
                self._sums[target] = checksum

    def forget(self, job: CopyJob) -> None:
        """Know nothing of the rows that a failed STORE or MOVE may have written."""
        for target in job.targets.tolist():
            self._sums.pop(target, None)

    def expected(self, job: CopyJob) -> dict[int, int]:
        """Checksums of a LOAD job's sources as they are now, by position."""
        sums = ((i, self._sums.get(source)) for i, source in enumerate(job.sources.tolist()))
        return {position: checksum for position, checksum in sums if checksum is not None}

    def verify(self, job: CopyJob, expected: dict[int, int], skip: Collection[int]) -> set[int]:
        """Positions of a finished LOAD job whose block does not hold the expected bytes.

        ``skip`` names the positions that failed anyway.
        """
        groups, blocks = job.groups().tolist(), job.blocks.tolist()
        checked = {p: checksum for p, checksum in expected.items() if p not in skip}
        wrong = {p for p, c in checked.items() if self._checksum(groups[p], blocks[p]) != c}
        self.verified += len(checked)
        self.mismatches += len(wrong)
        if wrong:
            logger.error("self-check: %d of %d verified blocks differ", len(wrong), len(checked))
        return wrong

    def _checksum(self, group: int, block: int) -> int:
        checksum = 0
        for page in self._layout.groups[group]:
            content = self._layout.tensors[page.tensor][block, : page.nbytes].cpu()
            checksum = zlib.crc32(content.numpy(), checksum)
        return checksum
