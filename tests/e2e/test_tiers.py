"""Snapshots in both tiers of a real engine: equal outputs, hits, demotions, promotions."""

from __future__ import annotations

from typing import Any

from conversation import (
    FIRST_ANSWER_TOKENS,
    FIRST_TURN_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    Said,
    answer,
    first_turn,
    forget_all,
    second_turn,
)
from server import ENGINE, Xinference

#: Forwards, so that the oldest leave the device tier first; then across.
ORDERS = (*range(PROMPTS), *range(PROMPTS), 3, 0, 5, 1, 4, 2)
BLOCK_TOKENS = ENGINE["block_size"]


def test_outputs_from_both_tiers_equal_those_without_the_cache(
    server: Xinference, cached_model: str, plain: tuple[Any, Said]
) -> None:
    forget_all(server, cached_model)
    before = server.stats(cached_model)["counters"]
    answers = [answer(server, cached_model, number) for number in ORDERS]
    assert answers == [plain[1].answers[number] for number in ORDERS]

    stats = server.stats(cached_model)
    grown = {name: stats["counters"][name] - before[name] for name in before}
    for name in ("hits_gpu_blocks", "hits_cpu_blocks", "demotions", "promotions"):
        assert grown[name] > 0, (name, grown)
    assert (grown["failed_copies"], grown["mismatches"]) == (0, 0)
    # The first pass computes everything; no later one computes a whole prompt.
    assert grown["misses_blocks"] == PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS)
    for tier in ("gpu", "cpu"):
        assert 0 < stats["tiers"][tier]["bytes"] <= stats["tiers"][tier]["budget_bytes"]


def test_next_turn_finds_what_the_last_one_decoded(
    server: Xinference, cached_model: str, plain: tuple[Any, Said]
) -> None:
    first = first_turn(server, cached_model)
    for number in range(3):  # more than the engine's own KV pool holds
        answer(server, cached_model, number)
    second = second_turn(server, cached_model, first)
    assert (first, second) == plain[1].turns

    receipt = server.stats(cached_model)["requests"][-1]
    # The last token that was sampled never had a place in the KV cache.
    known = (FIRST_TURN_TOKENS + FIRST_ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert receipt["engine"] + receipt["gpu"] + receipt["cpu"] == known
    assert receipt["engine"] <= FIRST_TURN_TOKENS
