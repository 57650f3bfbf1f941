"""Checksums that prove a loaded block holds the bytes that were stored.

A share of the stored blocks gets a checksum of its group's pages, taken from the KV block itself
and kept by location; it follows moves, and every load of such a row is verified in the KV block it
landed in. Choosing at the store rather than at the load makes a share of 0.001 cost 0.001 on both
sides, since a checksum costs several times a copy. Used from one thread at a time. On CUDA, reading
a block back synchronises with the device: a diagnostic, not for production.

The checksum is the dot product of a block's 64-bit words with odd random weights, modulo 2**64: any
change within one word changes it, for certain, and any other change but for a chance of about
2**-64. It takes one numpy call per page and job where a CRC takes one per page and block, each of
which may wait its turn for the interpreter.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from xinference_xavier.storage.jobs import CopyJob, Indexes
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
        largest = max(page.nbytes for group in layout.groups for page in group)
        words = np.random.default_rng(seed).integers(2**64, size=-(-largest // 8), dtype=np.uint64)
        self._weights = words | np.uint64(1)
        self._sums: dict[int, int] = {}
        #: Loads verified, and those whose bytes were not the stored ones.
        self.verified = 0
        self.mismatches = 0

    def stored(self, job: CopyJob) -> None:
        """Remember a share of a STORE job's blocks, and that the other rows have new content."""
        targets = job.targets.tolist()
        for target in targets:
            self._sums.pop(target, None)
        chosen = [i for i in range(len(targets)) if self._random.random() < self._share]
        for position, checksum in self._checksums(job, chosen).items():
            self._sums[targets[position]] = checksum

    def moved(self, job: CopyJob) -> None:
        """Copy what is known of a MOVE job's sources to its targets."""
        known = [self._sums.get(source) for source in job.sources.tolist()]
        for target, checksum in zip(job.targets.tolist(), known, strict=True):
            self._sums.pop(target, None)
            if checksum is not None:
                self._sums[target] = checksum

    def forget(self, locations: Indexes) -> None:
        """Know nothing of rows that something else may have written. Any thread."""
        for target in locations.tolist():
            self._sums.pop(target, None)

    def expected(self, job: CopyJob) -> dict[int, int]:
        """Checksums of a LOAD job's sources as they are now, by position."""
        sums = ((i, self._sums.get(source)) for i, source in enumerate(job.sources.tolist()))
        return {position: checksum for position, checksum in sums if checksum is not None}

    def verify(self, job: CopyJob, expected: dict[int, int], skip: Collection[int]) -> set[int]:
        """Positions of a finished LOAD job whose block does not hold the expected bytes.

        ``skip`` names the positions that failed anyway.
        """
        checked = [position for position in expected if position not in skip]
        found = self._checksums(job, checked)
        wrong = {position for position in checked if found[position] != expected[position]}
        self.verified += len(checked)
        self.mismatches += len(wrong)
        if wrong:
            logger.error("self-check: %d of %d verified blocks differ", len(wrong), len(checked))
        return wrong

    def _checksums(self, job: CopyJob, positions: Sequence[int]) -> dict[int, int]:
        """Checksums of the KV blocks at these positions of a job, by position."""
        sums: dict[int, int] = {}
        groups = job.groups()
        for group in set(groups[list(positions)].tolist()):
            part = [position for position in positions if groups[position] == group]
            found = self._of_blocks(group, job.blocks[part])
            sums.update(zip(part, found.tolist(), strict=True))
        return sums

    def _of_blocks(self, group: int, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Checksums, uint64 ``[n]``, of ``n`` blocks of one KV group."""
        total = np.zeros(len(blocks), np.uint64)
        for page in self._layout.groups[group]:
            tensor = self._layout.tensors[page.tensor]
            index = torch.from_numpy(blocks).to(tensor.device)
            content = tensor[index, : page.nbytes].cpu().numpy()
            if page.nbytes % 8:
                content = np.pad(content, ((0, 0), (0, -page.nbytes % 8)))
            words = content.view(np.uint64)
            total = total * self._weights[0] + words @ self._weights[: words.shape[1]]
        return total
