"""Checksums of rows that come from a peer: told by one rank, compared by another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rig import Rig

MakeRig = Callable[..., Rig]

#: Where the owner holds two blocks, and where the reader puts them.
THERE, HERE = np.array([2, ~5]), np.array([~1, 3])


def owner_and_reader(make_rig: MakeRig, layout: str, group: int) -> tuple[Rig, Rig]:
    """Two ranks; the second holds the bytes of the first one's rows, as after a read."""
    owner, reader = make_rig(layout, self_check=1.0), make_rig(layout, self_check=1.0)
    groups = len(owner.layout.groups)
    sizes = tuple(2 * int(number == group) for number in range(groups))
    owner.run(owner.store([1, 2], THERE.tolist(), sizes))
    reader.copier.row_check.forget(HERE)
    for there, here in zip(THERE.tolist(), HERE.tolist(), strict=True):
        reader.row(here).copy_(owner.row(there))
    return owner, reader


@pytest.mark.parametrize(("layout", "group"), [("uniform", 0), ("hybrid", 0), ("hybrid", 1)])
def test_a_changed_row_is_found_and_a_right_one_remembered(
    make_rig: MakeRig, layout: str, group: int
) -> None:
    owner, reader = owner_and_reader(make_rig, layout, group)
    told = owner.copier.row_check.tell(THERE)
    assert told is not None
    page = reader.layout.groups[group][-1]
    reader.row(3)[page.offset + page.nbytes - 1] ^= 1
    assert reader.copier.row_check.wrong(HERE, told) == [1]
    assert reader.copier.mismatches == 1
    # What was right is told on; what was wrong is not.
    known = reader.copier.row_check.tell(HERE)
    assert known == (told[0], [told[1][0], None])


def test_rows_that_changed_places_are_wrong(make_rig: MakeRig) -> None:
    """Both hold bytes that were stored, under other keys."""
    owner, reader = owner_and_reader(make_rig, "uniform", 0)
    told = owner.copier.row_check.tell(THERE)
    assert told is not None
    assert reader.copier.row_check.wrong(HERE[::-1].copy(), told) == [0, 1]


def test_nothing_is_compared_unless_both_check_in_the_same_way(make_rig: MakeRig) -> None:
    owner, reader = owner_and_reader(make_rig, "uniform", 0)
    scheme, sums = owner.copier.row_check.tell(THERE) or (0, [])
    reader.row(3)[0] ^= 1
    assert reader.copier.row_check.wrong(HERE, (scheme + 1, sums)) == []
    assert reader.copier.row_check.wrong(HERE, (scheme, [None, None])) == []
    assert reader.copier.mismatches == 0
    off = make_rig()
    assert off.copier.row_check.tell(THERE) is None
    assert off.copier.row_check.wrong(HERE, (scheme, sums)) == []
