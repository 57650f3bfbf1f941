"""How the pages of one KV block lie in one row of a slab.

A row holds the pages of every KV cache tensor of one KV group back to back, as raw bytes. This
module describes that arrangement; it copies nothing and owns no memory. Plain data, built once per
vLLM worker when the KV caches are registered, read from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: Pages and rows start at multiples of this, so that every row can be viewed as int64 words: the
#: CUDA kernels move eight bytes per lane, and numpy copies aligned words faster than bytes.
ROW_ALIGNMENT_BYTES = 8


def align_up(nbytes: int, alignment_bytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment_bytes``."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


class PageRef(NamedTuple):
    """One page of a block: bytes ``[0, nbytes)`` of a tensor's block, at ``offset`` in the row."""

    tensor: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The row format of one rank.

    ``tensors``: the KV caches, each int8 ``[num_blocks, page_bytes]`` with ``stride(1) == 1``;
    ``stride(0)`` may exceed ``page_bytes`` (packed layouts). ``groups``: per KV group, the pages of
    one of its blocks. ``row_bytes``: bytes of a row, enough for the largest group.
    """

    tensors: tuple[torch.Tensor, ...]
    groups: tuple[tuple[PageRef, ...], ...]
    row_bytes: int

    @classmethod
    def from_refs(
        cls,
        tensors: Sequence[torch.Tensor],
        group_refs: Sequence[Sequence[tuple[int, int]]],
    ) -> RowLayout:
        """Lay out rows for ``group_refs``: per KV group, ``(tensor index, page bytes)`` per layer.

        Layers of one group that share a tensor share a page, as large as the largest of them.
        Groups of a hybrid model may name the same tensors: a block belongs to one group at a time.

        Raises:
            ValueError: a tensor or a reference does not have the documented form.
        """
        _check_tensors(tensors)
        if not group_refs:
            raise ValueError("a row layout needs at least one KV group")
        groups = tuple(_pages(index, refs, tensors) for index, refs in enumerate(group_refs))
        row_bytes = max(pages[-1].offset + pages[-1].nbytes for pages in groups)
        return cls(tuple(tensors), groups, align_up(row_bytes, ROW_ALIGNMENT_BYTES))

    @property
    def num_blocks(self) -> int:
        """Blocks in each KV cache tensor."""
        return int(self.tensors[0].shape[0])

    @property
    def device(self) -> torch.device:
        """The device that holds the KV caches."""
        return self.tensors[0].device

    def group_bytes(self, group: int) -> int:
        """Payload bytes of one block of ``group``, without alignment gaps."""
        return sum(page.nbytes for page in self.groups[group])


def _check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ValueError("a row layout needs at least one KV cache tensor")
    for index, tensor in enumerate(tensors):
        if tensor.dtype != torch.int8 or tensor.ndim != 2:
            raise ValueError(
                f"KV cache tensor {index} must be int8 [num_blocks, page_bytes], "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if tensor.stride(1) != 1 or tensor.stride(0) < tensor.shape[1]:
            raise ValueError(
                f"KV cache tensor {index} must hold each page as adjacent bytes and no block "
                f"twice, got strides {tensor.stride()} for shape {tuple(tensor.shape)}"
            )
        if tensor.shape[0] != tensors[0].shape[0] or tensor.device != tensors[0].device:
            raise ValueError(
                f"KV cache tensor {index} has {tensor.shape[0]} blocks on {tensor.device}, "
                f"tensor 0 has {tensors[0].shape[0]} on {tensors[0].device}"
            )


def _pages(
    group: int, refs: Sequence[tuple[int, int]], tensors: Sequence[torch.Tensor]
) -> tuple[PageRef, ...]:
    sizes: dict[int, int] = {}  # keeps the order of first mention
    for tensor, nbytes in refs:
        if not 0 <= tensor < len(tensors):
            raise ValueError(f"KV group {group} names tensor {tensor} of {len(tensors)}")
        page_bytes = tensors[tensor].shape[1]
        if not 0 < nbytes <= page_bytes:
            raise ValueError(
                f"KV group {group} wants {nbytes} bytes of tensor {tensor}, "
                f"whose pages hold {page_bytes}"
            )
        sizes[tensor] = max(nbytes, sizes.get(tensor, 0))
    if not sizes:
        raise ValueError(f"KV group {group} names no tensor")
    pages, offset = [], 0
    for tensor, nbytes in sizes.items():
        pages.append(PageRef(tensor, offset, nbytes))
        offset = align_up(offset + nbytes, ROW_ALIGNMENT_BYTES)
    return tuple(pages)
