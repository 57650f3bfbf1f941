"""Injected faults and the self-check, over every copier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import Rig

from xinference_xavier.storage.faults import ENV_FAULTS, Faults, InjectedFaultError
from xinference_xavier.storage.self_check import SelfCheck

MakeRig = Callable[..., Rig]


def test_injected_faults_fail_their_job_alone(make_rig: MakeRig) -> None:
    rig = make_rig(faults=Faults.parse("move:1,load:1,store:2"))
    store, store_2, move, move_2, load, load_2 = rig.run(
        rig.store([1], [1]),
        rig.store([2], [2]),
        rig.move([1], [~1]),
        rig.move([1], [~2]),
        rig.load([5, 6], [1, ~2]),
        rig.load([7, 8], [1, ~2]),
    )
    assert [r.ok for r in (store, store_2, move, move_2)] == [True, False, False, True]
    assert load.failed.tolist() == [0, 1]  # the retry must not hide it
    assert "injected" in load.error
    assert load.nbytes == 0
    assert load_2.ok
    assert rig.block_pages(7) == rig.block_pages(8) == rig.block_pages(1)


def test_faults_are_read_from_the_environment_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_FAULTS, raising=False)
    assert Faults.from_env(0) is None
    monkeypatch.setenv(ENV_FAULTS, "load:2, move:1@rank1")
    rank_0, rank_1 = Faults.from_env(0), Faults.from_env(1)
    assert rank_0 is not None
    assert rank_1 is not None
    rank_0.strike("move")
    with pytest.raises(InjectedFaultError, match="move number 1"):
        rank_1.strike("move")
    rank_1.strike("move")
    rank_0.strike("load")
    with pytest.raises(InjectedFaultError, match="load number 2"):
        rank_0.strike("load")


@pytest.mark.parametrize("text", ["load", "load:0", "copy:1", "load:1@1", "load:1,,move:1"])
def test_malformed_faults_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=ENV_FAULTS):
        Faults.parse(text)


@pytest.mark.parametrize("location", [3, ~3])
@pytest.mark.parametrize("layout", ["uniform", "hybrid"])
def test_a_flipped_byte_is_found_in_the_loaded_block(
    make_rig: MakeRig, layout: str, location: int
) -> None:
    rig = make_rig(layout, self_check=1.0)
    last = len(rig.layout.groups) - 1
    two = tuple(2 * int(group == last) for group in range(last + 1))
    results = rig.run(rig.store([1, 2], [location, 4], two), rig.load([5, 6], [location, 4], two))
    assert all(result.ok for result in results)
    page = rig.layout.groups[last][-1]
    rig.row(location)[page.offset + page.nbytes - 1] ^= 1
    (result,) = rig.run(rig.load([7, 8], [location, 4], two))
    assert not result.ok
    assert result.failed.tolist() == [0]
    assert "self-check" in result.error
    assert rig.copier.mismatches == 1


def test_checksums_follow_moves_and_end_with_new_content(make_rig: MakeRig) -> None:
    rig = make_rig(self_check=1.0, faults=Faults.parse("store:3"))
    rig.run(rig.store([1, 2], [0, 1]), rig.move([0, 1], [~0, ~1]))
    rig.row(~0)[5] ^= 1
    moved_back, wrong = rig.run(rig.move([~0], [9]), rig.load([7, 8], [9, ~1]))
    assert moved_back.ok
    assert wrong.failed.tolist() == [0]
    rewritten, failed, loaded = rig.run(
        rig.store([3], [9]), rig.store([4], [~1]), rig.load([7, 8], [9, ~1])
    )
    assert (rewritten.ok, failed.ok, loaded.ok) == (True, False, True)
    assert rig.copier.mismatches == 1


def test_a_move_of_unknown_content_ends_the_checksum_of_its_target(make_rig: MakeRig) -> None:
    rig = make_rig(self_check=1.0)
    results = rig.run(rig.store([1], [0]), rig.move([7], [0]), rig.load([5], [0]))
    assert all(result.ok for result in results)
    assert rig.block_pages(5) == rig.row_pages(7)


def test_the_share_is_a_repeatable_sample() -> None:
    rig = Rig("cpu", "cross_layer")
    blocks = [block % 24 for block in range(400)]
    job = rig.store(blocks, range(400))
    known = []
    for seed in (1, 1, 2):
        check = SelfCheck(rig.layout, 0.25, seed)
        check.stored(job)
        known.append(sorted(check.expected(rig.load(blocks, range(400)))))
    rig.close()
    assert known[0] == known[1] != known[2]
    assert all(60 < len(positions) < 140 for positions in known)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    rig = Rig("cpu")
    with pytest.raises(ValueError, match="xavier_self_check"):
        SelfCheck(rig.layout, share)
    rig.close()
