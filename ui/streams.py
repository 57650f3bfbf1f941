"""Ends answers that stream for long when the server drains.

An ASGI layer. Runs on the event loop of Xinference's API process; only ``end_all`` may be called
from a signal handler of its thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EVENT_STREAM = b"text/event-stream"


class Streams:
    """Passes requests on to ``app``, and can end every event stream among the answers.

    From ``end_all`` on, new requests get 503 with ``Retry-After``: while an API is relaunched, its
    successor already listens and answers them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answers: set[_Answer] = set()
        self.draining = False

    def end_all(self) -> None:
        """End streams, now and from now on; other answers under way are finished."""
        self.draining = True
        for answer in tuple(self._answers):
            answer.loop.call_soon_threadsafe(answer.end_stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.draining:
            headers = {"Retry-After": "2", "Connection": "close"}
            detail = {"detail": "The server is ending or being replaced. Try again."}
            await JSONResponse(detail, 503, headers)(scope, receive, send)
            return
        answer = _Answer(send)
        self._answers.add(answer)
        try:
            await answer.run(self._app(scope, receive, answer.send))
        finally:
            self._answers.discard(answer)


class _Answer:
    """One answer. ``streaming`` from the start of an event stream to its end."""

    def __init__(self, send: Send) -> None:
        self.loop = asyncio.get_running_loop()
        self._send = send
        self._work: asyncio.Future[None] | None = None
        self.streaming = False
        self.unwelcome = False
        self.ended = False

    async def run(self, work: Awaitable[None]) -> None:
        """Do ``work`` until it is done or ``end_stream`` cuts it short."""
        self._work = asyncio.ensure_future(work)
        try:
            await self._work
        except asyncio.CancelledError:
            if not self.ended:
                self._work.cancel()
                raise
        if self.ended and self.streaming:
            self.streaming = False
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def end_stream(self) -> None:
        """Cut a stream short, also one that starts later; any other answer goes on."""
        self.unwelcome = True
        if self.streaming and not self.ended and self._work is not None:
            self.ended = True
            self._work.cancel()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.streaming = kind.startswith(_EVENT_STREAM)
        await self._send(message)
        if self.unwelcome:
            self.end_stream()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.streaming = False
