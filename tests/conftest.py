"""Hypothesis profiles shared by all tests, and a heap that is quick to collect.

``default`` is small and derandomized, so that a run says the same thing twice; ``nightly``, chosen
by ``XAVIER_TEST_PROFILE=nightly``, explores.
"""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

settings.register_profile(
    "default",
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "nightly",
    max_examples=5000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=_SLOW,
)
settings.load_profile(os.environ.get("XAVIER_TEST_PROFILE", "default"))


def pytest_collection_finish() -> None:
    """Keep what was imported out of later collections: they take seconds with vLLM and Xinference
    in memory, and many tests collect at their end, for connections that are left to the collector.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the last collection see them again: extension modules report what it leaves."""
    gc.unfreeze()
