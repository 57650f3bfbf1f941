"""Fixtures of the policy's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns after every few operations, so that they meet halfway."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
