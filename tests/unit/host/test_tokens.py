"""Tokens of prompts on Xinference's own model classes, with a tokenizer of one token per byte."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xinference")
pytest.importorskip("vllm")

import xoscar as xo
from test_classes import LAUNCH, SWITCH, build
from xinference.core.model import ModelActor

from xinference_xavier.host.engine.classes import XavierVLLMChatModel, XavierVLLMModel

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is it?"}]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


class Bytes:
    """A tokenizer."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=[1] * add_special_tokens + list(text.encode()))

    def apply_chat_template(self, messages: list[dict], **_: Any) -> str:
        raise AssertionError("the family brings its template")


def running(cls: type, path: Path) -> Any:
    model = build(cls, path, {**LAUNCH, **SWITCH})
    model._engine = SimpleNamespace(get_tokenizer=Bytes)
    return model


@pytest.mark.parametrize("cls", [XavierVLLMModel, XavierVLLMChatModel])
async def test_a_text_is_what_a_completion_gets(cls: type, tmp_path: Path) -> None:
    model = running(cls, tmp_path)
    assert await model.xavier_prompt_tokens("héllo") == [1, *"héllo".encode()]


async def test_messages_are_what_a_chat_gets(tmp_path: Path) -> None:
    model = running(XavierVLLMChatModel, tmp_path)
    tokens = await model.xavier_prompt_tokens(MESSAGES)
    text = bytes(tokens[1:]).decode()
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is it?")
    assert text.endswith("<|im_start|>assistant\n")
    assert len(tokens) == await model.async_count_tokens(MESSAGES)


@pytest.mark.parametrize(
    ("cls", "prompt", "words"),
    [
        (XavierVLLMModel, MESSAGES, "takes a text only"),
        (XavierVLLMChatModel, [3], "Error: "),
    ],
)
async def test_what_a_model_does_not_take_is_a_value_error(
    cls: type, prompt: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        await running(cls, tmp_path).xavier_prompt_tokens(prompt)


def test_the_model_actor_passes_the_call_on(tmp_path: Path) -> None:
    """By ``__getattr__``, over a socket as from the API process."""

    class Actor(xo.StatelessActor):
        __getattr__ = ModelActor.__getattr__

        def __init__(self) -> None:
            super().__init__()
            self._model = running(XavierVLLMChatModel, tmp_path)

    async def run() -> list[int]:
        pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0)
        try:
            ref = await xo.create_actor(Actor, uid="m", address=pool.external_address)
            tokens: list[int] = await ref.xavier_prompt_tokens("abc")
            return tokens
        finally:
            await pool.stop()

    assert asyncio.run(run()) == [1, *b"abc"]
