"""Run by test_kernels.py with TRITON_INTERPRET=1: the kernel against torch indexing, on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from xinference_xavier.storage.kernels import PageCopier
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.rowmap import row_addresses

NUM_BLOCKS = 6


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def check(tensors: list[torch.Tensor], refs: list[list[tuple[int, int]]]) -> None:
    """Gather two blocks of every group into rows, then scatter them into other blocks."""
    layout = RowLayout.from_refs(tensors, refs)
    groups = [group for group in range(len(refs)) for _ in range(2)]
    blocks = np.random.permutation(NUM_BLOCKS)[: len(groups)]
    others = (blocks + 1) % NUM_BLOCKS
    memory = random_bytes(len(groups) + 1, layout.row_bytes)
    copier, before, caches = PageCopier(layout), memory.clone(), [t.clone() for t in tensors]

    copier.warm_up(layout.row_bytes)
    assert all(torch.equal(t, c) for t, c in zip(tensors, caches, strict=True))

    addresses = row_addresses(memory, len(groups))
    positions = torch.from_numpy(np.stack([blocks, groups, addresses], 1))
    copier(positions, len(groups), to_rows=True)
    expected = before.clone()
    for row, (group, block) in enumerate(zip(groups, blocks, strict=True)):
        for tensor, offset, nbytes in layout.groups[group]:
            expected[row, offset : offset + nbytes] = caches[tensor][block, :nbytes]
    assert torch.equal(memory, expected)
    assert all(torch.equal(t, c) for t, c in zip(tensors, caches, strict=True))

    for start in range(0, len(groups), 2):  # one group at a time: groups share tensors
        part = slice(start, start + 2)
        positions = torch.from_numpy(np.stack([others, groups, addresses], 1)[part].copy())
        copier(positions, 2, to_rows=False)
        for row in range(start, start + 2):
            for tensor, offset, nbytes in layout.groups[groups[row]]:
                caches[tensor][others[row], :nbytes] = memory[row, offset : offset + nbytes]
        assert all(torch.equal(t, c) for t, c in zip(tensors, caches, strict=True))
    assert torch.equal(memory, expected)


def main() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    check([random_bytes(NUM_BLOCKS, 64) for _ in range(3)], [[(i, 64) for i in range(3)]])
    check([random_bytes(NUM_BLOCKS, 13), random_bytes(NUM_BLOCKS, 40)], [[(0, 13), (1, 39)]])
    packed = random_bytes(NUM_BLOCKS, 96)
    check([packed[:, :32], packed[:, 32:96]], [[(0, 32), (1, 64)]])
    check([random_bytes(NUM_BLOCKS, 48), random_bytes(NUM_BLOCKS, 24)], [[(0, 48)], [(1, 24)]])
    check([random_bytes(NUM_BLOCKS, 40_000)], [[(0, 40_000)]])  # more than one chunk
    print("kernels ok")


if __name__ == "__main__":
    main()
