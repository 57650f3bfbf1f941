"""The random models: the same bytes from the same seed, and one token per byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_model import VOCAB_SIZE, build, byte_level_tokenizer


def test_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, second, other = (
        (build(tmp_path / name, size="tiny", seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == second
    assert first != other


def test_a_token_is_a_byte() -> None:
    tokenizer = byte_level_tokenizer()
    text = "häuser\n 木 \t"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB_SIZE


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="name another folder"):
        build(tmp_path, size="tiny")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="huge"):
        build(tmp_path / "m", size="huge")
