"""Our part of Xinference's own web UI: one script tag in its pages, and the files behind it.

Covers: an ASGI layer that adds the tag to the UI's HTML and to nothing else, and the route that
serves ``static/webui/``. Does not cover: what the scripts do (``launch_switch.js`` there). Needs
no Gradio. Runs in Xinference's API process, on its event loop.
"""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Where the files are served. Not below ``/xavier``, which is the panel's and wants a credential:
#: a browser fetches scripts without one, as it does the UI's own.
STATIC_PATH = "/xavier-ui"
STATIC_FOLDER = Path(__file__).parent / "static" / "webui"
SCRIPT = "launch_switch.js"

#: The UI's own files in its pages; what stands before ``/_next/`` is the prefix that a browser
#: reaches the server by, as far as the page knows it.
_OWN_FILE = re.compile(rb"""(?:src|href)=["']((?:/[^"']*?)?)/_next/static/""")
_END_OF_HEAD = b"</head>"

#: Pages of other applications, which may stream for long, are held back no longer than this.
_MOST_HEAD_BYTES = 256 * 1024


def install(app: FastAPI) -> None:
    """Serve our files on ``app`` and add the script tag to its UI's pages.

    Call it while routes are being registered: before the catch-all route of the web UI, which
    would hide ours, and before the first request, after which Starlette takes no middleware.
    """
    app.mount(STATIC_PATH, RevalidatedFiles(directory=STATIC_FOLDER), name="xavier-ui")
    app.add_middleware(ScriptTag)


class RevalidatedFiles(StaticFiles):
    """Files that a browser may keep but asks about each time (ETag, 304), as the UI's pages are.

    So an upgrade of this package reaches every browser with the next page.
    """

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response: Response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


class ScriptTag:
    """ASGI layer: passes everything through, and adds one tag to the head of the UI's pages.

    A page of the UI is an uncompressed ``text/html`` answer to GET whose head refers to
    ``/_next/static/``. Other answers are passed on message by message, unchanged. An HTML answer
    is held back until its head has ended, its rest is streamed again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            send = _Page(scope, send).send
        await self.app(scope, receive, send)


class _Page:
    """One answer on its way out. ``_start`` is its first message while that is held back."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None
        self._body = b""
        self._answered = False

    async def send(self, message: Message) -> None:
        if self._start is not None:
            await self._collect(message)
        elif message["type"] != "http.response.start" or not _may_be_page(message):
            if not self._answered:
                await self._send(message)
        elif self._scope["method"] == "HEAD":
            # Whether the page gets the tag cannot be known without its body.
            _drop(MutableHeaders(scope=message), _OF_CONTENT)
            await self._send(message)
        else:
            self._start = message

    async def _collect(self, message: Message) -> None:
        """Hold back a page until its head has ended; then send all there is of it."""
        self._body += message.get("body", b"")
        end = self._body.find(_END_OF_HEAD)
        more = message["type"] == "http.response.body" and message.get("more_body", False)
        if end < 0 and more and len(self._body) < _MOST_HEAD_BYTES:
            return
        start, self._start = self._start or {}, None
        tag = script_tag(self._body[:end], self._scope.get("root_path", "")) if end >= 0 else b""
        if tag:
            headers = MutableHeaders(scope=start)
            _count_in(headers, tag)
            if start["status"] == 200 and self._is_known(headers):
                await self._answer_not_modified(headers)
                return
            message = {**message, "body": self._body[:end] + tag + self._body[end:]}
        elif message["type"] == "http.response.body":
            message = {**message, "body": self._body}
        await self._send(start)
        await self._send(message)

    def _is_known(self, headers: Headers) -> bool:
        """Whether the client has this very page (``If-None-Match``)."""
        asked = Headers(scope=self._scope).get("if-none-match", "").split(",")
        return headers.get("etag") in [known.strip().removeprefix("W/") for known in asked]

    async def _answer_not_modified(self, headers: MutableHeaders) -> None:
        """Answer 304, and drop what the application still sends."""
        self._answered = True
        _drop(headers, _OF_BODY)
        await self._send({"type": "http.response.start", "status": 304, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": b""})


#: Headers that differ when the tag is added: the page's length, its version, its file's date.
_OF_CONTENT = ("content-length", "etag", "last-modified")
#: Headers that describe a body which a 304 does not have.
_OF_BODY = ("content-length", "content-type")


def script_tag(head: bytes, root_path: str) -> bytes:
    """The tag for a page with this head; nothing when it is no page of the UI.

    The script is reached as the page reaches the UI's own files: by their prefix, else by the
    ``root_path`` that the server was told.
    """
    own = _OWN_FILE.search(head)
    if own is None:
        return b""
    prefix = own.group(1) or html.escape(root_path.rstrip("/")).encode()
    return b'<script type="module" src="%s%s/%s"></script>' % (
        prefix,
        STATIC_PATH.encode(),
        SCRIPT.encode(),
    )


def _may_be_page(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return (
        start["status"] in (200, 404)
        and headers.get("content-type", "").startswith("text/html")
        and "content-encoding" not in headers
    )


def _count_in(headers: MutableHeaders, tag: bytes) -> None:
    """Let the headers of a page be those of the page with ``tag``."""
    length, etag = headers.get("content-length"), headers.get("etag")
    _drop(headers, _OF_CONTENT)
    if length:
        headers["content-length"] = str(int(length) + len(tag))
    if etag:
        headers["etag"] = etag.rstrip('"') + f'-{hashlib.sha256(tag).hexdigest()[:8]}"'


def _drop(headers: MutableHeaders, names: tuple[str, ...]) -> None:
    for name in names:
        del headers[name]
