"""Row layouts: what is accepted, what is refused, where pages lie."""

from __future__ import annotations

import pytest
import torch

from xinference_xavier.storage.layout import PageRef, RowLayout


def pages(*page_bytes: int, blocks: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(blocks, size, dtype=torch.int8) for size in page_bytes]


def test_pages_lie_back_to_back_at_word_boundaries() -> None:
    layout = RowLayout.from_refs(pages(16, 13, 5), [[(0, 16), (1, 13), (2, 5)]])
    assert layout.groups == ((PageRef(0, 0, 16), PageRef(1, 16, 13), PageRef(2, 32, 5)),)
    assert layout.row_bytes == 40
    assert layout.group_bytes(0) == 34
    assert layout.num_blocks == 4


def test_layers_that_share_a_tensor_share_its_page() -> None:
    layout = RowLayout.from_refs(pages(32, 32), [[(1, 16), (0, 32), (1, 24)]])
    assert layout.groups == ((PageRef(1, 0, 24), PageRef(0, 24, 32)),)


def test_a_row_holds_the_largest_group() -> None:
    layout = RowLayout.from_refs(pages(32, 16), [[(0, 8)], [(0, 32), (1, 16)], [(1, 12)]])
    assert layout.row_bytes == 48
    assert [layout.group_bytes(group) for group in range(3)] == [8, 48, 12]


@pytest.mark.parametrize(
    ("tensors", "refs", "message"),
    [
        ([], [[(0, 8)]], "at least one KV cache tensor"),
        (pages(8), [], "at least one KV group"),
        (pages(8), [[]], "names no tensor"),
        (pages(8), [[(1, 8)]], "names tensor 1 of 1"),
        (pages(8), [[(-1, 8)]], "names tensor -1"),
        (pages(8), [[(0, 9)]], "wants 9 bytes of tensor 0"),
        (pages(8), [[(0, 0)]], "wants 0 bytes"),
        ([torch.zeros(4, 8)], [[(0, 8)]], "must be int8"),
        ([torch.zeros(4, 2, 4, dtype=torch.int8)], [[(0, 8)]], "must be int8"),
        ([torch.zeros(8, 4, dtype=torch.int8).T], [[(0, 8)]], "adjacent bytes"),
        ([torch.zeros(1, 8, dtype=torch.int8).expand(4, 8)], [[(0, 8)]], "no block twice"),
        ([*pages(8), *pages(8, blocks=5)], [[(0, 8)]], "has 5 blocks"),
    ],
)
def test_what_does_not_fit_is_refused(
    tensors: list[torch.Tensor], refs: list[list[tuple[int, int]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RowLayout.from_refs(tensors, refs)
