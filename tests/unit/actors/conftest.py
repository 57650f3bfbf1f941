"""Fixtures over ``pool_process``."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pool_process import PoolProcess


@pytest.fixture
def supervisor() -> Iterator[PoolProcess]:
    pool = PoolProcess(tracker=True)
    yield pool
    pool.kill()


@pytest.fixture(autouse=True)
def _collect_connections() -> Iterator[None]:
    """xoscar leaves client connections to the collector: not to that of another test."""
    yield
    gc.collect()
