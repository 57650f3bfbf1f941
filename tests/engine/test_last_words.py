"""The reason why an engine does not start reaches the process that launched it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xinference_xavier.engine.last_words import LastWords, last_words
from xinference_xavier.types import CapacityError


def test_the_first_rank_that_fails_is_heard() -> None:
    words = LastWords()
    for sentence in ("too small:\n  16 bytes", "the other rank"):
        with pytest.raises(CapacityError), last_words(str(words.path)):
            raise CapacityError(sentence)
    assert words.read() == "too small: 16 bytes"
    words.close()
    words.close()
    assert not words.path.exists()
    assert words.read() == ""


def test_nothing_is_said_when_nothing_of_ours_failed(tmp_path: Path) -> None:
    words = LastWords()
    with last_words(str(words.path)):
        pass
    assert words.read() == ""
    words.close()
    for path in (str(tmp_path / "of another machine"), None):
        with pytest.raises(MemoryError), last_words(path):
            raise MemoryError
    assert list(tmp_path.iterdir()) == []
