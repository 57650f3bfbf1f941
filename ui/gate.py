"""The door of everything below ``/xavier``: authentication, sessions, prefixes, refusals.

An ASGI layer around the whole mounted application: no path of Gradio, now or in a later version,
is reached without it. Runs on the event loop of Xinference's API process.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import access
from .access import COOKIE, NEEDS_LOGIN, SAFE, SCOPE_KEY, Authority

STATIC = Path(__file__).parent / "static"

#: Route that turns a token into a cookie (POST) and forgets the cookie (DELETE).
SESSION = "/session"

#: Paths of Gradio that let a reader have files written or addresses fetched; the panel uses none.
_NOT_OURS = re.compile(
    r"^/gradio_api/(upload|proxy=|vibe|undo-vibe|process_recording|run-history|stream|dev)"
)
_PREFIX = re.compile(r"^(/[A-Za-z0-9._~-]+)+$")

#: Nothing from elsewhere, and in no other page's frame. Gradio's own page has inline scripts and
#: compiles templates.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; frame-ancestors 'self'; base-uri 'self'; "
    "form-action 'self'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Gate:
    """Lets a request through to ``app`` when the host's authentication does.

    ``app`` finds the request's ``Access`` in ``scope[SCOPE_KEY]``.
    """

    def __init__(self, app: ASGIApp, authority: Authority) -> None:
        self._app = app
        self._authority = authority

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        scope = with_prefix(scope)
        request = Request(scope)
        try:
            answer = await self._answer(request, scope)
        except HTTPException as error:
            answer = _refusal(request, error)
        if answer is None:
            await self._app(scope, receive, _with_headers(send))
        else:
            await answer(scope, receive, _with_headers(send))

    async def _answer(self, request: Request, scope: Scope) -> Response | None:
        """Our own answer, or None to let the request through.

        Raises:
            HTTPException: for what is refused.
        """
        path = inner_path(scope)
        if path == SESSION:
            return await self._session(request, scope)
        scope[SCOPE_KEY] = await self._authority.access(scope)
        if request.method not in SAFE:
            self._refuse_forgery(request)
        if _NOT_OURS.match(path):
            raise HTTPException(404, "The panel has no such path.")
        # A page asks every few seconds: what it reads is no matter for the host's audit log.
        scope.setdefault("state", {})["audit_recorded"] = True
        return None

    async def _session(self, request: Request, scope: Scope) -> Response:
        """Exchange the token of the host's own UI for a cookie, or forget that."""
        if request.method not in ("POST", "DELETE"):
            raise HTTPException(
                405, "POST with a Bearer token, or DELETE.", {"Allow": "POST, DELETE"}
            )
        self._refuse_forgery(request)
        answer = Response(status_code=204)
        # Without a path of its own a cookie belongs to the folder of the request's address, as
        # the browser sees it: also behind a proxy that adds a prefix we do not know.
        kept: dict[str, Any] = {"path": None, "httponly": True, "samesite": "strict"}
        if request.method == "DELETE":
            answer.set_cookie(COOKIE, "", max_age=0, **kept)
            return answer
        if self._authority.is_on:
            found = access.credential(request)
            if found is None or found.by_cookie:
                raise HTTPException(401, NEEDS_LOGIN)
            await self._authority.access(scope)
            answer.set_cookie(COOKIE, found.token, secure=_is_secure(request), **kept)
        return answer

    def _refuse_forgery(self, request: Request) -> None:
        """HTTP 403 when another origin's page may have made a browser send this.

        A token in a header is no browser's own doing; without authentication no header proves
        anything, since the host lets pages of all origins send any.
        """
        found = access.credential(request) if self._authority.is_on else None
        if (found is None or found.by_cookie) and not access.is_same_origin(request):
            detail = "Refused: the request does not come from the panel's own page."
            raise HTTPException(403, detail)


def with_prefix(scope: Scope) -> Scope:
    """The scope under the prefix that a proxy has taken off (``X-Forwarded-Prefix``).

    Only the client's own page depends on it, so that no proxy need be trusted for it.
    """
    prefix = Request(scope).headers.get("x-forwarded-prefix", "").partition(",")[0].strip()
    prefix = prefix.rstrip("/")
    root = scope.get("root_path", "")
    if not _PREFIX.match(prefix) or root.startswith(prefix + "/"):
        return dict(scope)
    return {**scope, "root_path": prefix + root, "path": prefix + scope["path"]}


def inner_path(scope: Scope) -> str:
    """The path below the mount."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _is_secure(request: Request) -> bool:
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip()
    return str(forwarded or request.url.scheme) == "https"


def _refusal(request: Request, error: HTTPException) -> Response:
    """A page for a browser that opens one, JSON for everything else."""
    opens = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    if error.status_code == 401 and opens:
        return HTMLResponse((STATIC / "sign_in.html").read_text("utf-8"), 401)
    headers = dict(error.headers or {})
    if error.status_code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"detail": error.detail}, error.status_code, headers)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return send_with_headers
