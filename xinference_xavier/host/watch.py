"""Lets what is ours live as long as the host's application, the sampler and the metrics first.

Covers: making those two, and starting and ending things with the application. Does not cover
sampling (``sampler.py``) or which metrics there are (``metrics.py``). ``attach`` runs while the
host registers its routes, in Xinference's API process.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from xinference_xavier.host.sampler import Sampler, View

logger = logging.getLogger(__name__)


def attach(api: Any, view: View) -> Sampler:
    """Sample ``view`` while the application of ``api`` runs.

    The sampler is ``api._app.state.xavier_sampler`` from now on.
    """
    sampler = api._app.state.xavier_sampler = Sampler(view)

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        stop_metrics = _start_metrics(sampler)
        sampler.start()
        try:
            yield
        finally:
            sampler.stop()
            stop_metrics()

    live_with(api._app, life)
    return sampler


def live_with(app: Any, life: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
    """Enter ``life`` when the application has started, and leave it before it ends.

    The host gives its application a lifespan, so handlers of start-up events would not run.
    """
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with original(app) as state, life():
            yield state

    app.router.lifespan_context = lifespan


def _start_metrics(sampler: Sampler) -> Callable[[], None]:
    """Show the metrics; returns what ends that. Never raises: the server works without."""
    try:
        from xinference_xavier.host.exporter import Exporter

        exporter = Exporter(sampler)
        exporter.start()
    except Exception:
        logger.warning("The metrics xinference:xavier_* are not available", exc_info=True)
        return lambda: None
    return exporter.stop
