"""Fixtures over ``pool_process``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool_process import PoolProcess


@pytest.fixture
def supervisor() -> Iterator[PoolProcess]:
    pool = PoolProcess()
    yield pool
    pool.kill()
