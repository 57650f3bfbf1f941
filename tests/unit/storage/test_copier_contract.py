"""What every copier promises, byte for byte, over every shape of KV cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rig import LAYOUTS, NUM_BLOCKS, ROWS, Rig

from xinference_xavier.storage.copier import CopyKind
from xinference_xavier.types import NOWHERE

MakeRig = Callable[..., Rig]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

# Runs up, runs down, gaps and singles, on both sides and in both tiers.
BLOCKS = [3, 4, 5, 6, 12, 11, 10, 9, 20, 1, 15]
LOCATIONS = [0, 1, 2, ~5, ~6, ~7, ~3, 9, 8, 7, ~0]


def sizes(rig: Rig) -> tuple[int, ...]:
    """Share eleven positions out among the layout's groups, leaving a middle group empty."""
    return {1: (11,), 3: (6, 0, 5)}[len(rig.layout.groups)]


def groups(rig: Rig) -> list[int]:
    return [group for group, count in enumerate(sizes(rig)) for _ in range(count)]


@every_layout
def test_store_to_both_tiers_writes_the_named_rows_only(make_rig: MakeRig, layout: str) -> None:
    rig = make_rig(layout)
    caches, rows = rig.caches(), rig.rows()
    (result,) = rig.run(rig.store(BLOCKS, LOCATIONS, sizes(rig)))
    assert (result.ok, result.error, len(result.failed)) == (True, "", 0)
    assert result.kind is CopyKind.STORE
    assert result.nbytes == sum(rig.layout.group_bytes(group) for group in groups(rig))
    assert result.seconds > 0
    for block, location, group in zip(BLOCKS, LOCATIONS, groups(rig), strict=True):
        assert rig.row_pages(location, group) == rig.block_pages(block, group)
    assert all(map(torch.equal, rig.caches(), caches))
    after = rig.rows()
    assert all(after[at] == rows[at] for at in rows if at not in LOCATIONS)


@every_layout
def test_load_from_both_tiers_writes_the_named_pages_only(make_rig: MakeRig, layout: str) -> None:
    rig = make_rig(layout)
    expected, rows = rig.caches(), rig.rows()
    (result,) = rig.run(rig.load(BLOCKS, LOCATIONS, sizes(rig)))
    assert result.ok
    for block, location, group in zip(BLOCKS, LOCATIONS, groups(rig), strict=True):
        for page in rig.layout.groups[group]:
            content = rig.row(location).cpu()[page.offset : page.offset + page.nbytes]
            expected[page.tensor][block, : page.nbytes] = content
    assert all(map(torch.equal, rig.caches(), expected))
    assert rig.rows() == rows


@every_layout
def test_moves_go_both_ways_and_leave_their_sources(make_rig: MakeRig, layout: str) -> None:
    rig = make_rig(layout)
    before = rig.rows()
    pairs = [(0, ~0), (1, ~1), (2, ~2), (3, ~9), (~12, 12), (~13, 13), (~4, 8), (5, 6)]
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    (result,) = rig.run(rig.move(sources, targets))
    assert result.ok
    assert result.nbytes == len(pairs) * rig.layout.row_bytes
    moved = {target: before[source] for source, target in pairs}
    assert rig.rows() == before | moved


@every_layout
def test_a_block_survives_store_demotion_promotion_and_load(make_rig: MakeRig, layout: str) -> None:
    rig = make_rig(layout)
    last = len(rig.layout.groups) - 1
    one = tuple(int(group == last) for group in range(last + 1))
    stored = rig.block_pages(7, last)
    # Submitted together: later jobs must see what earlier ones wrote.
    results = rig.run(
        rig.store([7], [0], one),
        rig.move([0], [~3]),
        rig.store([8], [0], one),
        rig.move([~3], [5]),
        rig.load([21], [5], one),
        rig.load([22], [~3], one),
    )
    assert all(result.ok for result in results)
    assert rig.block_pages(21, last) == rig.block_pages(22, last) == stored
    assert rig.row_pages(0, last) == rig.block_pages(8, last)


def test_a_position_without_a_row_fails_alone(make_rig: MakeRig) -> None:
    rig = make_rig()
    before = rig.caches()
    (result,) = rig.run(rig.load([1, 2, 3, 4], [0, NOWHERE, ~1, NOWHERE]))
    assert not result.ok
    assert result.failed.tolist() == [1, 3]
    assert "gone" in result.error
    assert result.nbytes == 2 * rig.layout.group_bytes(0)
    assert rig.block_pages(1) == rig.row_pages(0)
    assert rig.block_pages(3) == rig.row_pages(~1)
    for block in (2, 4):
        assert all(
            torch.equal(t[block].cpu(), b[block])
            for t, b in zip(rig.layout.tensors, before, strict=True)
        )


@every_layout
def test_a_failing_load_is_retried_position_by_position(make_rig: MakeRig, layout: str) -> None:
    rig = make_rig(layout)
    last = len(rig.layout.groups) - 1
    three = tuple(3 * int(group == last) for group in range(last + 1))
    (result,) = rig.run(rig.load([1, 2, 3], [4, ROWS, ~4], three))
    assert result.failed.tolist() == [1]
    assert "IndexError" in result.error
    assert rig.block_pages(1, last) == rig.row_pages(4, last)
    assert rig.block_pages(3, last) == rig.row_pages(~4, last)


def test_bad_jobs_fail_whole_and_later_jobs_run(make_rig: MakeRig) -> None:
    rig = make_rig()
    bad = [
        rig.store([1, NUM_BLOCKS], [0, 1]),
        rig.store([-1], [0]),
        rig.store([1], [ROWS]),
        rig.store([1], [~ROWS]),
        rig.store([1, 2], [0]),
        rig.store([1, 2], [0, 1], (1,)),
        rig.store([1, 2], [0, 1], (1, 1)),
        rig.move([0], [NOWHERE]),
        rig.move([0, 1], [3]),
    ]
    load = rig.load([1, NUM_BLOCKS], [0, 1])
    good = rig.store([5], [2])
    *results, load_result, good_result = rig.run(*bad, load, good)
    assert not any(result.ok for result in results)
    assert all(result.error and not len(result.failed) for result in results)
    assert load_result.failed.tolist() == [0, 1]
    assert good_result.ok
    assert rig.row_pages(2) == rig.block_pages(5)


@pytest.mark.parametrize(("tiers", "there", "missing"), [("device", 3, ~3), ("host", ~3, 3)])
def test_a_tier_that_is_off_fails_its_copies(
    make_rig: MakeRig, tiers: str, there: int, missing: int
) -> None:
    rig = make_rig(tiers=tiers)
    before = rig.block_pages(4)
    stored, refused, loaded = rig.run(
        rig.store([4], [there]), rig.store([4], [missing]), rig.load([5, 6], [there, missing])
    )
    assert stored.ok
    assert not refused.ok
    assert "switched off" in refused.error
    assert loaded.failed.tolist() == [1]
    assert rig.block_pages(5) == before


def test_an_empty_job_succeeds(make_rig: MakeRig) -> None:
    rig = make_rig("hybrid")
    results = rig.run(rig.store([], [], (0, 0, 0)), rig.load([], [], (0, 0, 0)), rig.move([], []))
    assert all(result.ok and result.nbytes == 0 for result in results)


def test_blocks_may_be_overwritten_after_wait(make_rig: MakeRig) -> None:
    rig = make_rig()
    stored = [rig.block_pages(block) for block in range(8)]
    job = rig.store(range(8), [0, 1, 2, 3, ~0, ~1, ~2, ~3])
    rig.copier.submit(job)
    rig.copier.wait({job.job_id, 999})
    for tensor in rig.layout.tensors:
        rig.compute(lambda tensor=tensor: tensor[:8].fill_(0))
    rig.collect(1)
    assert [rig.row_pages(at) for at in (0, 1, 2, 3, ~0, ~1, ~2, ~3)] == stored


def test_a_store_comes_after_the_computation_before_it(make_rig: MakeRig) -> None:
    rig = make_rig()
    for tensor in rig.layout.tensors:
        rig.compute(lambda tensor=tensor: tensor[2].fill_(42))
    (result,) = rig.run(rig.store([2, 2], [1, ~1]))
    assert result.ok
    expected = bytes([42]) * rig.layout.group_bytes(0)
    assert rig.row_pages(1) == rig.row_pages(~1) == expected


@pytest.mark.parametrize("sources", [[1, 2], [~1, ~2], [1, ~2]])
def test_a_load_comes_after_the_computation_before_it(
    make_rig: MakeRig, sources: list[int]
) -> None:
    rig = make_rig()
    for tensor in rig.layout.tensors:
        rig.compute(lambda pages=tensor[4:6]: pages.fill_(42))
    (result,) = rig.run(rig.load([4, 5], sources))
    assert result.ok
    if rig.runtime is not None:
        rig.runtime.drain()
    assert [rig.block_pages(block) for block in (4, 5)] == [rig.row_pages(at) for at in sources]


def test_a_closed_copier_fails_jobs_instead_of_raising(make_rig: MakeRig) -> None:
    rig = make_rig()
    (first,) = rig.run(rig.store([1], [1]))
    rig.copier.close()
    store, load = rig.run(rig.store([2], [2]), rig.load([2, 3], [0, 1]))
    assert first.ok
    assert not store.ok
    assert "closed" in store.error
    assert load.failed.tolist() == [0, 1]


def test_close_finishes_what_was_submitted(make_rig: MakeRig) -> None:
    rig = make_rig()
    stored = [rig.block_pages(block) for block in range(12)]
    for block in range(12):
        rig.copier.submit(rig.store([block], [~block]))
    rig.copier.close()
    assert [rig.row_pages(~block) for block in range(12)] == stored
    assert all(result.ok for result in rig.collect(12).values())
