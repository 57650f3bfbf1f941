"""Caught exceptions are counted by reason, and logged once per burst."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from xinference_xavier import swallowed


def fail(reason: str, times: int) -> None:
    for _ in range(times):
        try:
            raise OSError("planned")
        except OSError:
            swallowed.note(logging.getLogger("test"), reason, "something failed")


def test_a_burst_is_counted_whole_and_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(swallowed, "_counts", Counter())
    fail("one", 9)
    fail("other", 1)
    assert swallowed.counts() == {"one": 9, "other": 1}
    assert caplog.text.count("something failed") == 5  # the 1st, 2nd, 4th, 8th; and the other
    assert "OSError: planned" in caplog.text
