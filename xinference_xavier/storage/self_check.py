"""Checksums that prove a loaded block holds the bytes that were stored.

A share of the stored blocks gets a checksum of its group's pages, taken from the KV block itself
and kept by location; it follows moves, and every load of such a row is verified in the KV block it
landed in. Peers that read such a row get its checksum too (``row_check.py``). Choosing at the store
rather than at the load makes a share of 0.001 cost 0.001 on both sides, since a checksum costs
several times a copy. Copies are noted and verified on the copier's thread, rows of peers beside it.
On CUDA, reading a block back synchronises with the device: a diagnostic, not for production.

The checksum is the dot product of a block's 64-bit words with odd random weights, modulo 2**64: any
change within one word changes it, for certain, and any other change but for a chance of about
2**-64. It takes one numpy call per page and job where a CRC takes one per page and block, each of
which may wait its turn for the interpreter.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from xinference_xavier.storage.jobs import CopyJob, Indexes
from xinference_xavier.storage.layout import RowLayout

logger = logging.getLogger(__name__)

#: KV group and checksum of a row's content.
Sum = tuple[int, int]


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
        #: Two ranks of equal scheme give equal bytes equal checksums.
        self.scheme = int(self._weights @ np.arange(1, len(words) + 1, dtype=np.uint64))
        self._sums: dict[int, Sum] = {}
        #: Loads and fetched rows verified, and those whose bytes were not the stored ones.
        self.verified = 0
        self.mismatches = 0
        self._counting = threading.Lock()

    def stored(self, job: CopyJob) -> None:
        """Remember a share of a STORE job's blocks, and that the other rows have new content."""
        targets = job.targets.tolist()
        for target in targets:
            self._sums.pop(target, None)
        chosen = [i for i in range(len(targets)) if self._random.random() < self._share]
        groups = job.groups()
        for position, checksum in self._checksums(job, chosen).items():
            self._sums[targets[position]] = int(groups[position]), checksum

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

    def known(self, locations: Indexes) -> list[Sum | None]:
        """What is known of these rows now. Any thread."""
        return [self._sums.get(location) for location in locations.tolist()]

    def learn(self, sums: Iterable[tuple[int, Sum]]) -> None:
        """Rows whose content a peer has stored, by location. Any thread."""
        self._sums.update(sums)

    def expected(self, job: CopyJob) -> dict[int, int]:
        """Checksums of a LOAD job's sources as they are now, by position."""
        sums = enumerate(self.known(job.sources))
        return {position: known[1] for position, known in sums if known is not None}

    def verify(self, job: CopyJob, expected: dict[int, int], skip: Collection[int]) -> set[int]:
        """Positions of a finished LOAD job whose block does not hold the expected bytes.

        ``skip`` names the positions that failed anyway.
        """
        checked = [position for position in expected if position not in skip]
        found = self._checksums(job, checked)
        wrong = {position for position in checked if found[position] != expected[position]}
        self.note(len(checked), len(wrong), "loaded blocks")
        return wrong

    def note(self, verified: int, wrong: int, what: str) -> None:
        """Count what was verified, and say so when some of it was wrong. Any thread."""
        with self._counting:
            before = self.mismatches
            self.verified += verified
            self.mismatches += wrong
        if before.bit_length() != self.mismatches.bit_length():  # not every one of a burst
            logger.error(
                "xavier: the self-check found other bytes than were stored in %d of %d %s (%d in "
                "all); they are computed again",
                *(wrong, verified, what, self.mismatches),
            )

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
        pages = self._layout.groups[group]
        tensors = self._layout.tensors
        return self._sum(
            (_read(tensors[p.tensor], blocks, 0, p.nbytes) for p in pages), len(blocks)
        )

    def of_rows(self, memory: torch.Tensor, rows: npt.NDArray[np.int64], group: int) -> list[int]:
        """Checksums of ``n`` rows of ``memory``, uint8 ``[rows, row_bytes]``, that hold blocks of
        a KV group. Any thread."""
        pages = self._layout.groups[group]
        contents = (_read(memory, rows, page.offset, page.nbytes) for page in pages)
        return [int(checksum) for checksum in self._sum(contents, len(rows))]

    def _sum(self, pages: Iterable[npt.NDArray[np.uint8]], count: int) -> npt.NDArray[np.uint64]:
        """Checksums, uint64 ``[count]``, of blocks by their pages, uint8 ``[count, nbytes]``."""
        total = np.zeros(count, np.uint64)
        for content in pages:
            if content.shape[1] % 8:
                content = np.pad(content, ((0, 0), (0, -content.shape[1] % 8)))  # noqa: PLW2901
            words = content.view(np.uint64)
            total = total * self._weights[0] + words @ self._weights[: words.shape[1]]
        return total


def _read(
    memory: torch.Tensor, at: npt.NDArray[np.int64], start: int, nbytes: int
) -> npt.NDArray[np.uint8]:
    """Bytes ``[start, start + nbytes)`` of the rows ``at`` of memory, on the host."""
    index = torch.from_numpy(at).to(memory.device)
    content: npt.NDArray[np.uint8] = memory[index, start : start + nbytes].cpu().numpy()
    return content.view(np.uint8)
