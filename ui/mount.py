"""Puts the panel at ``/xavier/`` of Xinference's own server.

Covers: the routes, the layers around the panel, and its life. Does not cover what is on it
(``panel.py``). Gradio is imported when the panel is first opened, in a thread of its own: it takes
seconds, which no start of the server has to wait for. Runs in Xinference's API process.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from importlib import import_module, util

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from xinference_xavier.host.drain import on_drain
from xinference_xavier.host.parts import Parts
from xinference_xavier.host.watch import live_with

from .access import Authority
from .gate import Gate
from .streams import Streams

logger = logging.getLogger(__name__)

PATH = "/xavier"
PANEL = "xinference_xavier.ui.panel"
MISSING = (
    "The panel needs Gradio, which is not installed. Install it with pip install "
    "'xinference-xavier[ui]' where Xinference runs, and restart Xinference. The numbers are at "
    "/v1/xavier without it."
)


def install(parts: Parts) -> None:
    """Add the panel's routes to the host's application, and let it live as long as that."""
    panel = Panel(parts)
    streams = Streams(panel)
    on_drain(streams.end_all)

    authority = Authority(parts.auth_service)
    parts.app.add_route(PATH, Gate(_to_folder, authority), include_in_schema=False)
    parts.app.mount(PATH, Gate(streams, authority), name="xavier-panel")
    live_with(parts.app, lambda: aclosing(panel))


async def _to_folder(scope: Scope, receive: Receive, send: Send) -> None:
    """Redirect to the same path with a slash; relative, so that it holds below any prefix."""
    query = Request(scope).url.query
    answer = RedirectResponse(f"{PATH.removeprefix('/')}/{'?' if query else ''}{query}")
    await answer(scope, receive, send)


class Panel:
    """The Gradio application, made by the first request; a sentence where Gradio is missing."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._life: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ASGIApp] | None = None
        self._ending = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if util.find_spec("gradio") is None:
            await HTMLResponse(f"<!doctype html><p>{MISSING}</p>", 503)(scope, receive, send)
            return
        app = await asyncio.shield(self._opened())
        # Gradio's application is mounted below the same path inside one of our own.
        outer = scope["root_path"].removesuffix(PATH)
        await app({**scope, "root_path": outer}, receive, send)

    def _opened(self) -> asyncio.Future[ASGIApp]:
        """The application once it runs; one that failed to start is tried again."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(self._ready), name="xavier-panel")
        return self._ready

    async def _live(self, ready: asyncio.Future[ASGIApp]) -> None:
        """Make the application and keep its own tasks running, until ``aclose``."""
        try:
            module = await asyncio.to_thread(import_module, PANEL)
            holder = FastAPI(openapi_url=None)
            module.mount(holder, PATH, self._parts)
            async with holder.router.lifespan_context(holder):
                ready.set_result(holder)
                await self._ending.wait()
        except Exception as error:
            logger.warning("The panel does not start", exc_info=True)
            if not ready.done():
                ready.set_exception(error)

    async def aclose(self) -> None:
        """End the application's own tasks."""
        self._ending.set()
        if self._life is not None:
            await asyncio.wait([self._life], timeout=5)
