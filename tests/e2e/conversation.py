"""The requests that are sent to a model with the cache and to one without, for comparison.

Covers: prompts, orders and what came back. Does not cover: where the tokens came from. Requests
are sequential: only then is an fp32 model's output a witness of its KV cache.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from server import Xinference

PROMPTS = 6
#: Not a multiple of the block size. One token is one byte of text.
PROMPT_TOKENS = 2000
ANSWER_TOKENS = 16

#: A first turn and its answer, which cross several blocks.
FIRST_TURN_TOKENS = 1000
FIRST_ANSWER_TOKENS = 96


@dataclass(frozen=True)
class Said:
    """Answers to the prompts, and of the two turns."""

    answers: list[str]
    turns: tuple[str, str]


def text(seed: int, tokens: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + " .,\n", k=tokens))


def ask(server: Xinference, model_uid: str, prompt: str, tokens: int = ANSWER_TOKENS) -> str:
    answer = server.complete(model_uid, prompt, max_tokens=tokens)
    answer.raise_for_status()
    body = answer.json()
    assert body["usage"]["prompt_tokens"] == len(prompt)
    said: str = body["choices"][0]["text"]
    assert len(said) == tokens
    return said


def answer(server: Xinference, model_uid: str, number: int) -> str:
    """Answer to prompt ``number``."""
    return ask(server, model_uid, text(number, PROMPT_TOKENS))


def fill_engine(server: Xinference, model_uid: str) -> None:
    """Let the engine's own cache forget what it was asked before."""
    for seed in (900, 901, 902):
        ask(server, model_uid, text(seed, PROMPT_TOKENS), 1)


def forget_all(server: Xinference, model_uid: str) -> None:
    """Leave nothing of what other tests asked."""
    fill_engine(server, model_uid)
    server.client.post(f"/v1/xavier/{model_uid}/clear").raise_for_status()


def first_turn(server: Xinference, model_uid: str) -> str:
    prompt = text(PROMPTS, FIRST_TURN_TOKENS)
    return ask(server, model_uid, prompt, FIRST_ANSWER_TOKENS)


def second_turn(server: Xinference, model_uid: str, first_answer: str) -> str:
    prompt = text(PROMPTS, FIRST_TURN_TOKENS) + first_answer + text(PROMPTS + 1, 100)
    return ask(server, model_uid, prompt)


def converse(server: Xinference, model_uid: str) -> Said:
    """Everything once."""
    answers = [answer(server, model_uid, number) for number in range(PROMPTS)]
    first = first_turn(server, model_uid)
    return Said(answers, (first, second_turn(server, model_uid, first)))
