"""The serving benchmark's requests: what is shared, what is not, and who is asked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.serving.runs import order, plan
from benchmarks.serving.workload import PARTS, Sizes, Stage, interleaved, rounds, shared, tiers

SIZES = Sizes.scaled(0.05)


def prompts(stages: list[Stage], *groups: str) -> list[str]:
    return [r.prompt for stage in stages for r in stage.requests if r.group in groups]


def common(first: str, second: str) -> int:
    """Characters, and so tokens, that two prompts begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_full_scale_is_what_was_published() -> None:
    streams, incoming = interleaved(Sizes.scaled(1.0), 0)
    assert streams.background
    assert [r.max_tokens for r in streams.requests] == [1024] * 8
    assert [r.at for r in incoming.requests] == pytest.approx([0.1 * i for i in range(32)])
    assert {(len(r.prompt), r.max_tokens) for r in incoming.requests} == {(4400, 64)}
    assert Sizes.scaled(1.0).rounds == 3


@pytest.mark.parametrize("part", PARTS)
def test_the_same_prompts_each_time_and_others_in_each_round(part: str) -> None:
    first, again = list(rounds(part, SIZES)), list(rounds(part, SIZES))
    assert first == again
    groups = ("incoming", "stream", "prepare", "warm16", "warm32")
    found = [set(prompts(stages, *groups)) for stages in first]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(found, 2))
    longest = max(map(common, *zip(*itertools.product(found[0], found[1]), strict=True)))
    assert longest < 16


def test_unique_prompts_share_less_than_a_block() -> None:
    for part in ("interleaved", "unique"):
        for stages in rounds(part, SIZES):
            found = prompts(stages, "incoming")
            assert max(common(a, b) for a, b in itertools.combinations(found, 2)) < 32


def test_shared_prefixes_are_computed_at_one_replica_and_asked_at_the_other() -> None:
    """Requests in the order of their arrival take turns."""
    for sizes in (SIZES, replace(SIZES, streams=3)):
        sent = [
            request
            for stage in shared(sizes, 0)
            for request in sorted(stage.requests, key=lambda request: request.at)
        ]
        turns = {r.name: place % 2 for place, r in enumerate(sent)}
        assert {turns[r.name] for r in sent if r.group == "prepare"} == {0}
        assert {turns[r.name] for r in sent if r.group == "incoming"} == {1}
        prefixes = prompts(shared(sizes, 0), "prepare")
        for number, prompt in enumerate(prompts(shared(sizes, 0), "incoming")):
            assert prompt.startswith(prefixes[number % sizes.prefixes])


def test_tiers_ask_each_replica_again_what_it_has_computed() -> None:
    first, again = tiers(SIZES, 0)
    turns = {request.prompt: place % 2 for place, request in enumerate(first.requests)}
    assert [turns[r.prompt] for r in again.requests] == [0, 1] * 6
    assert again.requests[0].prompt == first.requests[8].prompt


@pytest.mark.parametrize("part", PARTS)
def test_the_engine_takes_the_longest_request(part: str) -> None:
    for scale in (0.01, 0.1, 1.0):
        sizes = Sizes.scaled(scale)
        for stage in PARTS[part](sizes, 0):
            for r in stage.requests:
                said = len(r.prompt) + sum(map(len, r.turns)) + (1 + len(r.turns)) * r.max_tokens
                assert said <= sizes.max_model_tokens


@pytest.mark.parametrize("scale", [0, -1, 1.5])
def test_a_scale_that_cannot_be_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"--scale .*at most 1"):
        Sizes.scaled(scale)


def test_a_count_that_cannot_be_is_refused_by_its_option() -> None:
    with pytest.raises(ValueError, match="--stream-cap 0"):
        Sizes.scaled(0.1, stream_cap=0)


def test_modes_alternate_so_that_drift_meets_all_alike() -> None:
    assert order(["plain", "xavier"], 1) == ["plain", "xavier", "xavier", "plain"]
    assert order(["a", "b", "c"], 2) == ["a", "b", "c", "c", "b", "a"] * 2


def test_nobody_is_steered_where_no_replicas_take_turns() -> None:
    stages = shared(SIZES, 0)
    steered, straight = plan(stages, steered=True), plan(stages, steered=False)
    groups = {r["group"] for stage in straight for r in stage["requests"]}  # type: ignore[attr-defined]
    assert groups == {"prepare", "stream", "incoming"}
    assert len(str(steered)) > len(str(straight))
