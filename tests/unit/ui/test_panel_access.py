"""Who gets through the panel's door: every route that we add, for every kind of credential."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from panel_api import PanelApi
from xinference_xavier.ui.access import COOKIE

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
    ),
]

SAME = {"Sec-Fetch-Site": "same-origin", "Origin": "http://api"}
HTML = {"Accept": "text/html"}

#: Who, and what reading a page answers.
READING = {None: 401, "other": 403, "reader": 200, "key": 200, "admin": 200}


def gradio_routes(made: PanelApi) -> list[tuple[str, str]]:
    """(method, path) of every route of the mounted application, as it is mounted."""
    panel = panel_of(made)
    holder = panel._ready.result()
    [mounted] = [route.app for route in holder.routes if getattr(route, "path", "") == "/xavier"]
    found = []
    for route in mounted.routes:
        for method in getattr(route, "methods", None) or {"GET"}:
            found.append((method, "/xavier" + re.sub(r"\{[^}]*\}", "x", route.path)))
    return sorted(set(found))


def streams_of(made: PanelApi) -> Any:
    """The layer around the panel that ends streams."""
    [mount] = [r for r in made.api._app.routes if getattr(r, "name", "") == "xavier-panel"]
    return mount.app._app


def panel_of(made: PanelApi) -> Any:
    return streams_of(made)._app


async def test_every_route_wants_a_credential(secured: PanelApi) -> None:
    """No route of Gradio's, known or not, answers anything without one, or without the scope."""
    async with secured.client("admin") as admin:
        assert (await admin.get("/xavier/")).status_code == 200
    routes = gradio_routes(secured)
    assert len(routes) > 60
    names = {path for _, path in routes}
    assert {"/xavier/config", "/xavier/theme.css", "/xavier/gradio_api/queue/join"} <= names
    assert {"/xavier/gradio_api/heartbeat/x", "/xavier/gradio_api/startup-events"} <= names
    assert {"/xavier/gradio_api/reset", "/xavier/gradio_api/cancel"} <= names
    routes += [("GET", "/xavier"), ("GET", "/xavier/new_in_a_later_gradio")]
    before = secured.failures
    async with secured.client() as anonymous, secured.client("other") as other:
        for method, path in routes:
            assert (await anonymous.request(method, path)).status_code == 401, path
            assert (await other.request(method, path)).status_code == 403, path
        anonymous.cookies.set(COOKIE, "stale.or.forged")
        for method, path in routes:
            answer = await anonymous.request(method, path, headers=SAME)
            assert answer.status_code == 401, path
    assert secured.failures == before


@pytest.mark.parametrize("path", ["/xavier/", "/xavier/config", "/xavier/theme.css"])
@pytest.mark.parametrize(("who", "status"), READING.items())
async def test_reading(secured: PanelApi, path: str, who: str | None, status: int) -> None:
    async with secured.client(who) as http:
        assert (await http.get(path)).status_code == status


@pytest.mark.parametrize(("who", "status"), READING.items())
async def test_the_bare_path_leads_to_the_folder(
    secured: PanelApi, who: str | None, status: int
) -> None:
    async with secured.client(who) as http:
        answer = await http.get("/xavier", params={"model": "a b"})
        assert answer.status_code == (307 if status == 200 else status)
        if status == 200:
            assert answer.url.join(answer.headers["location"]) == "http://api/xavier/?model=a+b"


async def exchange(http: httpx.AsyncClient, token: str, **headers: str) -> httpx.Response:
    sent = {**SAME, "Authorization": f"Bearer {token}", **headers}
    return await http.post("/xavier/session", headers=sent)


@pytest.mark.parametrize(("who", "status"), READING.items())
async def test_a_token_becomes_a_cookie(secured: PanelApi, who: str | None, status: int) -> None:
    async with secured.client() as browser:
        if who is None:
            answer = await browser.post("/xavier/session", headers=SAME)
        else:
            answer = await exchange(browser, secured.tokens[who])
        assert answer.status_code == (204 if status == 200 else status)
        if status != 200:
            assert "set-cookie" not in answer.headers
            return
        kept = answer.headers["set-cookie"]
        assert "HttpOnly" in kept
        assert "SameSite=strict" in kept
        # No path of its own: that of the request's folder, /xavier.
        [cookie] = browser.cookies.jar
        assert (cookie.path, cookie.path_specified) == ("/xavier", False)
        assert (await browser.get("/xavier/", headers=SAME)).status_code == 200
        assert (await browser.get("/v1/xavier", headers=SAME)).status_code == 401
        await browser.delete("/xavier/session", headers=SAME)
        assert not list(browser.cookies.jar)


async def test_a_cookie_is_secure_behind_https(secured: PanelApi) -> None:
    async with secured.client() as browser:
        answer = await exchange(browser, secured.tokens["reader"], **{"X-Forwarded-Proto": "https"})
        assert "Secure" in answer.headers["set-cookie"]


async def test_a_browser_without_a_session_gets_a_page_that_finds_one(secured: PanelApi) -> None:
    async with secured.client() as browser:
        answer = await browser.get("/xavier/", headers=HTML)
        assert (answer.status_code, answer.headers["content-type"][:9]) == (401, "text/html")
        assert 'sessionStorage.getItem("token")' in answer.text
        other = await browser.get("/xavier/config")
        assert (other.status_code, other.headers["www-authenticate"]) == (401, "Bearer")
        assert "Log in" in other.json()["detail"]


async def test_nothing_a_browser_does_by_itself_leads_to_a_ban(secured: PanelApi) -> None:
    """Ten failures would ban the address for an hour: neither cookies nor expired tokens count."""
    expired = secured.api._auth_service.create_access_token(1, "admin", ["admin"], token_version=9)
    async with secured.client() as browser:
        browser.cookies.set(COOKIE, expired)
        for _ in range(12):
            assert (await browser.get("/xavier/", headers={**SAME, **HTML})).status_code == 401
            assert (await browser.post("/xavier/gradio_api/reset", headers=SAME)).status_code == 401
            assert (await exchange(browser, expired)).status_code == 401
        browser.cookies.set(COOKIE, "sk-made-up")
        for _ in range(12):
            assert (await browser.get("/xavier/", headers=SAME)).status_code == 401
    assert secured.failures == 0
    async with secured.client("admin") as admin:
        assert (await admin.get("/v1/admin/users")).status_code == 200


async def test_guessing_keys_counts_as_everywhere_else(secured: PanelApi) -> None:
    async with secured.client(Authorization="Bearer sk-guess") as stranger:
        for _ in range(10):
            assert (await stranger.get("/xavier/config")).status_code == 401
        assert (await stranger.get("/xavier/config")).status_code == 429
    async with secured.client("admin") as admin:
        assert (await admin.get("/xavier/config")).status_code == 429


async def test_a_disabled_user_s_cookie_ends(secured: PanelApi) -> None:
    async with secured.client() as browser:
        await exchange(browser, secured.tokens["reader"])
        assert (await browser.get("/xavier/config", headers=SAME)).status_code == 200
        users = secured.api._auth_service.db
        users.update_user(secured.users["reader"], enabled=0)
        try:
            assert (await browser.get("/xavier/config", headers=SAME)).status_code == 401
        finally:
            users.update_user(secured.users["reader"], enabled=1)


#: What a browser says of a request, and whether the cookie it adds counts for GET and for POST.
SITES = [
    ({"Sec-Fetch-Site": "same-origin"}, True, True),
    ({"Sec-Fetch-Site": "none"}, True, True),
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, True, False),
    ({"Sec-Fetch-Site": "same-site", "Origin": "http://api:8080"}, False, False),
    ({"Sec-Fetch-Site": "cross-site", "Origin": "http://evil"}, False, False),
    # Plain http on a name other than localhost: browsers send no Sec-Fetch-Site.
    ({"Origin": "http://api"}, True, True),
    ({"Origin": "http://evil"}, False, False),
    ({"Origin": "http://api:8080"}, False, False),
    ({"Origin": "null"}, False, False),
    ({"Origin": "http://shown", "X-Forwarded-Host": "shown"}, True, True),
    ({}, True, False),
]


@pytest.mark.parametrize(("headers", "reads", "changes"), SITES)
async def test_only_our_own_pages_use_the_cookie(
    secured: PanelApi, headers: dict[str, str], reads: bool, changes: bool
) -> None:
    async with secured.client() as browser:
        await exchange(browser, secured.tokens["admin"])
        got = await browser.get("/xavier/config", headers=headers)
        assert (got.status_code == 200) == reads
        sent = await browser.post(
            "/xavier/gradio_api/reset", headers=headers, json={"event_id": "x"}
        )
        assert (sent.status_code == 200) == changes
        by_header = {**headers, "Authorization": f"Bearer {secured.tokens['admin']}"}
        sent = await browser.post(
            "/xavier/gradio_api/reset", headers=by_header, json={"event_id": "x"}
        )
        assert sent.status_code == 200


async def test_without_authentication_only_forgeries_are_refused(open_api: PanelApi) -> None:
    async with open_api.client() as http:
        assert (await http.get("/xavier/")).status_code == 200
        assert (await http.post("/xavier/session", headers=SAME)).status_code == 204
        reset = {"json": {"event_id": "x"}}
        path = "/xavier/gradio_api/reset"
        assert (await http.post(path, headers=SAME, **reset)).status_code == 200
        for made_up in ({}, {"Authorization": "Bearer x"}, {"Authorization": "x"}):
            evil = await http.post(path, headers={"Origin": "http://evil", **made_up}, **reset)
            assert evil.status_code == 403


@pytest.mark.parametrize("path", ["upload", "proxy=http://x/", "vibe-edit", "stream/x"])
async def test_what_gradio_offers_and_we_do_not_use_is_closed(
    open_api: PanelApi, path: str
) -> None:
    async with open_api.client() as http:
        answer = await http.post(f"/xavier/gradio_api/{path}", headers=SAME)
        assert answer.status_code == 404
        assert "no such path" in answer.json()["detail"]
