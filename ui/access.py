"""Whose request it is and what it may do, asked of the host's authentication.

Covers: finding the credential of a request, checking it, and whether a browser sent the request
from our own pages. Does not cover what a refusal looks like (``gate.py``). Runs on the event loop
of Xinference's API process.

The host bans an address for an hour after ten failed credentials, and a browser sends a cookie
with every request: so a cookie, and a token that the host signed once, reach the host's check only
when it would pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from fastapi.security import SecurityScopes
from starlette.types import Message, Scope

from xinference_xavier.host.parts import READ_SCOPE, WRITE_SCOPE

COOKIE = "xavier_session"
#: Key in the ASGI scope under which the request's ``Access`` is passed on.
SCOPE_KEY = "xavier.access"
#: Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

NEEDS_LOGIN = "Log in to Xinference: this page needs a session or an API key."
NEEDS_WRITE = f"Not allowed: changing a cache needs the scope {WRITE_SCOPE}."


class Access:
    """What the credential of one request allows.

    ``token`` is None where the host's authentication is off; then everything is allowed.
    """

    def __init__(self, authority: Authority, scope: Scope, token: str | None, user: str) -> None:
        self._authority, self._scope, self._token = authority, scope, token
        self.user = user

    async def may_change(self) -> bool:
        """Whether it holds the scope ``models:write`` now."""
        if self._token is None:
            return True
        try:
            await self._authority.check(self._scope, self._token, WRITE_SCOPE)
        except HTTPException:
            return False
        return True


@dataclass(frozen=True)
class Credential:
    """``token`` as the client sent it; ``by_cookie`` when a browser added it by itself."""

    token: str
    by_cookie: bool


class Authority:
    """Asks the host's authentication service, or allows everything where that is None."""

    def __init__(self, service: Any | None) -> None:
        self._service = service

    @property
    def is_on(self) -> bool:
        return self._service is not None

    async def access(self, scope: Scope) -> Access:
        """The access of one request.

        Raises:
            HTTPException: 401 without a credential that holds, 403 without the scope to read,
                429 for an address that the host has banned.
        """
        if not self.is_on:
            return Access(self, scope, None, "anonymous")
        found = credential(Request(scope))
        if found is None:
            raise HTTPException(401, NEEDS_LOGIN)
        user = await self.check(scope, found.token, READ_SCOPE, count=not found.by_cookie)
        return Access(self, scope, found.token, user)

    async def check(self, scope: Scope, token: str, wanted: str, count: bool = False) -> str:
        """Name of the user if ``token`` holds the scope ``wanted``.

        ``count``: whether the host may count a failure of a credential it does not know. One that
        has the form of its own signed tokens is never counted: it cannot be guessed, and expires.

        Raises:
            HTTPException: as ``access``.
        """
        assert self._service is not None
        if not (self._is_known(token) or (count and token.count(".") != 2)):
            raise HTTPException(401, NEEDS_LOGIN)
        # What the host notes of a request in ``state`` goes to its audit log: once, by ``gate.py``.
        request = Request({**scope, "method": "GET", "state": {}}, _no_body)
        user = await self._service(request, SecurityScopes([wanted]), token)
        return str(user.get("username", "")) if isinstance(user, dict) else ""

    def _is_known(self, token: str) -> bool:
        """Whether the host issued it and it still holds. Counts nothing."""
        service = self._service
        assert service is not None
        known: list[Any] = [service.verify_access_token(token), service.validate_api_key(token)]
        return any(found is not None for found in known)


def credential(request: Request) -> Credential | None:
    """The header's credential, else the cookie's if one of our own pages sent the request."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return Credential(token.strip(), by_cookie=False)
    cookie = request.cookies.get(COOKIE)
    return Credential(cookie, by_cookie=True) if cookie and may_carry_cookie(request) else None


def may_carry_cookie(request: Request) -> bool:
    """Whether to believe that the user, and no other page, sent this request.

    SameSite=Strict keeps other sites' pages out; this keeps out those of other ports of our host
    as well, which are of the same site.
    """
    site = request.headers.get("sec-fetch-site")
    if site == "same-site":
        opens: bool = request.headers.get("sec-fetch-mode") == "navigate"
        return opens and request.method == "GET"
    return is_same_origin(request)


def is_same_origin(request: Request) -> bool:
    """Whether a request is no forgery by another origin's page.

    A browser says where a page's request comes from, and no page can change what it says. What
    says nothing is believed for methods that change nothing only.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return request.method in SAFE
    told = {request.headers.get("host"), request.headers.get("x-forwarded-host")}
    return urlsplit(origin).netloc in {host.partition(",")[0].strip() for host in told if host}


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
