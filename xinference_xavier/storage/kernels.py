"""The Triton kernel that moves pages between KV blocks and rows, and its table of addresses.

One launch serves a whole job, whatever the mix of KV groups, tensors and strides: every program
copies one chunk of one page of one position. Addresses are plain integers, so rows may lie in any
allocation on the device. The kernel runs unchanged in Triton's interpreter on CPU tensors, which is
how it is tested without a GPU. Imported on CUDA (and by that test) only: needs triton.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from xinference_xavier.storage.layout import RowLayout

WORD_BYTES = 8
#: Words of one program: 16 KiB in flight, a chunk or two of a usual page.
CHUNK_WORDS = 2048


@triton.jit
def copy_pages_kernel(  # type: ignore[no-untyped-def]
    positions,  # int64 [n, 3]: block, KV group, address of the row
    group_first,  # int64 [groups + 1]: index of the group's first page
    pages,  # int64 [pages, 4]: tensor address, block stride, offset in the row, size; bytes
    TO_ROWS: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
):
    """Copy chunk ``program_id(2)`` of page ``program_id(1)`` of position ``program_id(0)``."""
    position = positions + tl.program_id(0) * 3
    block = tl.load(position)
    group = tl.load(position + 1)
    row = tl.load(position + 2)
    index = tl.load(group_first + group) + tl.program_id(1)
    if index < tl.load(group_first + group + 1):
        page = pages + index * 4
        block_address = tl.load(page) + block * tl.load(page + 1)
        row_address = row + tl.load(page + 2)
        if WORD == 8:
            in_block = block_address.to(tl.pointer_type(tl.int64))
            in_row = row_address.to(tl.pointer_type(tl.int64))
        else:
            in_block = block_address.to(tl.pointer_type(tl.int8))
            in_row = row_address.to(tl.pointer_type(tl.int8))
        word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
        mask = word < tl.load(page + 3) // WORD
        if TO_ROWS:
            tl.store(in_row + word, tl.load(in_block + word, mask=mask), mask=mask)
        else:
            tl.store(in_block + word, tl.load(in_row + word, mask=mask), mask=mask)


class PageCopier:
    """Launches the kernel for one layout; its table lies on the layout's device."""

    def __init__(self, layout: RowLayout) -> None:
        table = [
            (
                layout.tensors[page.tensor].data_ptr(),
                layout.tensors[page.tensor].stride(0),
                page.offset,
                page.nbytes,
            )
            for group in layout.groups
            for page in group
        ]
        counts = [len(group) for group in layout.groups]
        self._pages = torch.tensor(table, dtype=torch.int64, device=layout.device)
        self._group_first = torch.tensor(
            np.cumsum([0, *counts]), dtype=torch.int64, device=layout.device
        )
        # Rows and offsets are always word-aligned; a model's pages usually are.
        aligned = not np.any(np.array(table, np.int64) % WORD_BYTES)
        self._word_bytes = WORD_BYTES if aligned else 1
        largest_words = max(entry[3] for entry in table) // self._word_bytes
        self._grid = (max(counts), -(-largest_words // CHUNK_WORDS))

    def warm_up(self, row_bytes: int) -> None:
        """Compile both directions now, not on the first store: block 0 to a row and back."""
        row = torch.empty(row_bytes, dtype=torch.uint8, device=self._pages.device)
        position = torch.tensor([[0, 0, row.data_ptr()]], device=self._pages.device)
        self(position, 1, to_rows=True)
        self(position, 1, to_rows=False)

    def __call__(self, positions: torch.Tensor, count: int, *, to_rows: bool) -> None:
        """Copy the pages of ``count`` positions, int64 ``[>= count, 3]``, on the current stream."""
        grid = (count, *self._grid)
        copy_pages_kernel[grid](
            positions,
            self._group_first,
            self._pages,
            TO_ROWS=to_rows,
            WORD=self._word_bytes,
            CHUNK=CHUNK_WORDS,
        )
