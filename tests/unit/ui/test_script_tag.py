"""The script tag in the web UI's pages, its files, and what must pass through untouched."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse
from xinference_xavier.ui import webui

from xinference_xavier.config import OPTIONS, XavierOptions

PAGE = '<!DOCTYPE html><html><head><script src="/_next/static/a.js"></script></head><body>x</body>'
TAG = '<script type="module" src="/xavier-ui/launch_switch.js"></script>'


def behind(app: FastAPI) -> httpx.AsyncClient:
    webui.install(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ui")


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    """Pages and others, served as Xinference serves them."""
    app = FastAPI()
    page = tmp_path / "index.html"
    page.write_text(PAGE)
    large = tmp_path / "large.html"
    large.write_text(PAGE + "y" * 300_000)
    asset = tmp_path / "a.txt"
    asset.write_text(PAGE)

    @app.api_route("/", methods=["GET", "HEAD", "POST"])
    def index() -> FileResponse:
        return FileResponse(page, headers={"cache-control": "no-cache"})

    @app.get("/large")
    def index_of_many_chunks() -> FileResponse:
        return FileResponse(large)

    @app.get("/missing")
    def missing() -> FileResponse:
        return FileResponse(page, status_code=404)

    @app.get("/flight.txt")
    def flight() -> FileResponse:
        return FileResponse(asset)

    @app.get("/docs-like")
    def other_page() -> HTMLResponse:
        return HTMLResponse("<html><head><title>Other</title></head>/_next/static/</html>")

    @app.get("/compressed")
    def compressed() -> HTMLResponse:
        return HTMLResponse(PAGE, headers={"content-encoding": "br"})

    @app.get("/api")
    def api() -> JSONResponse:
        return JSONResponse({"page": PAGE})

    return app


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/large", 200), ("/missing", 404)])
async def test_pages_get_one_tag_and_their_length(app: FastAPI, path: str, status: int) -> None:
    async with behind(app) as http:
        answer = await http.get(path)
    assert answer.status_code == status
    assert answer.text.startswith(PAGE.replace("</head>", TAG + "</head>"))
    assert answer.text.count(TAG) == 1
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "last-modified" not in answer.headers


@pytest.mark.parametrize("path", ["/flight.txt", "/docs-like", "/compressed", "/api", "/nowhere"])
async def test_other_answers_stay_byte_for_byte(app: FastAPI, path: str) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ui") as http:
        request = http.build_request("GET", path)
        plain = await http.send(request, stream=True)
        before = [chunk async for chunk in plain.aiter_raw()]
    async with behind(FastAPI(routes=app.routes)) as http:
        answer = await http.send(http.build_request("GET", path), stream=True)
        after = [chunk async for chunk in answer.aiter_raw()]
    assert (answer.status_code, answer.headers, after) == (plain.status_code, plain.headers, before)


async def test_a_known_page_is_not_sent_again(app: FastAPI) -> None:
    async with behind(app) as http:
        first = await http.get("/")
        etag = first.headers["etag"]
        for asked in (etag, f'"other", W/{etag}'):
            again = await http.get("/", headers={"if-none-match": asked})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
            assert again.headers["cache-control"] == "no-cache"
            assert "content-length" not in again.headers
        assert (await http.get("/large", headers={"if-none-match": etag})).status_code == 200


async def test_the_page_with_the_tag_is_another_version(app: FastAPI) -> None:
    transport = httpx.ASGITransport(FastAPI(routes=app.routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://ui") as http:
        plain = (await http.get("/")).headers["etag"]
    async with behind(app) as http:
        answer = await http.get("/", headers={"if-none-match": plain})
    assert answer.status_code == 200
    assert answer.headers["etag"] != plain
    assert answer.headers["etag"].startswith(plain.rstrip('"'))


async def test_head_promises_nothing_it_cannot_know(app: FastAPI) -> None:
    async with behind(app) as http:
        answer = await http.head("/")
    assert (answer.status_code, answer.content) == (200, b"")
    assert not {"content-length", "etag", "last-modified"} & set(answer.headers)


async def test_other_methods_are_left_alone(app: FastAPI) -> None:
    async with behind(app) as http:
        assert (await http.post("/")).text == PAGE


async def through(messages: list[dict[str, Any]], **scope: Any) -> list[dict[str, Any]]:
    """What the layer sends on, and when: each message with how many went in before it came out."""
    out: list[dict[str, Any]] = []

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        for number, message in enumerate(messages, start=1):
            await send(message)
            for sent in out:
                sent.setdefault("after", number)

    async def collect(message: Any) -> None:
        out.append(dict(message))

    whole = {"type": "http", "method": "GET", "headers": [], **scope}
    await webui.ScriptTag(application)(whole, None, collect)  # type: ignore[arg-type]
    return out


def start(content_type: bytes) -> dict[str, Any]:
    headers = [(b"content-type", content_type)]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body(text: str, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def test_streams_are_passed_on_message_by_message() -> None:
    sent = [start(b"text/event-stream"), body("data: 1\n\n", True), body("", False)]
    out = await through(sent)
    assert [message.pop("after") for message in out] == [1, 2, 3]
    assert out == sent


async def test_a_streamed_page_waits_for_its_head_only() -> None:
    head, rest = PAGE[:40], PAGE[40:]
    sent = [start(b"text/html"), body(head, True), body(rest, True), body("later", False)]
    out = await through(sent)
    assert [message["after"] for message in out] == [3, 3, 4]
    assert out[1]["body"].decode() == PAGE.replace("</head>", TAG + "</head>")
    assert out[2]["body"] == b"later"
    assert b"content-length" not in dict(out[0]["headers"])


async def test_html_without_end_of_head_is_not_held_for_ever() -> None:
    sent = [start(b"text/html"), *[body("z" * 100_000, True)] * 4, body("", False)]
    out = await through(sent)
    assert [message["after"] for message in out] == [4, 4, 5, 6]
    assert b"".join(message.get("body", b"") for message in out) == b"z" * 400_000


async def test_a_file_sent_by_the_server_is_passed_on() -> None:
    """An answer whose body the server reads itself (``http.response.pathsend``)."""
    sent = [start(b"text/html"), {"type": "http.response.pathsend", "path": "/page.html"}]
    out = await through(sent)
    assert [message["type"] for message in out] == [message["type"] for message in sent]


async def test_other_protocols_pass() -> None:
    sent = [{"type": "websocket.accept"}]
    assert [m["type"] for m in await through(sent, type="websocket")] == ["websocket.accept"]


@pytest.mark.parametrize(
    ("head", "root_path", "source"),
    [
        (b'<script src="/_next/static/a.js">', "", b"/xavier-ui/launch_switch.js"),
        (b'<link href="/team/x/_next/static/a.css"/>', "", b"/team/x/xavier-ui/launch_switch.js"),
        (b'<script src="/_next/static/a.js">', "/p/", b"/p/xavier-ui/launch_switch.js"),
        (b'<script src="/in/_next/static/a.js">', "/p", b"/in/xavier-ui/launch_switch.js"),
        (b'<script src="/_next/static/a.js">', '/"><b', b"/&quot;&gt;&lt;b/xavier-ui/launch_swi"),
    ],
)
def test_the_script_is_found_where_the_page_finds_its_own(
    head: bytes, root_path: str, source: bytes
) -> None:
    assert b'src="' + source in webui.script_tag(head, root_path)


def test_pages_that_take_their_files_elsewhere_are_no_pages_of_this_server() -> None:
    assert webui.script_tag(b'<script src="https://cdn/_next/static/a.js">', "") == b""


@pytest.mark.parametrize("name", sorted(path.name for path in webui.STATIC_FOLDER.iterdir()))
async def test_files_are_served_and_revalidated(app: FastAPI, name: str) -> None:
    async with behind(app) as http:
        answer = await http.get(f"{webui.STATIC_PATH}/{name}")
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-cache"
        kinds = {".js": "javascript", ".css": "text/css"}
        assert kinds[Path(name).suffix] in answer.headers["content-type"]
        known = {"if-none-match": answer.headers["etag"]}
        again = await http.get(f"{webui.STATIC_PATH}/{name}", headers=known)
        assert (again.status_code, again.content) == (304, b"")
        head = await http.head(f"{webui.STATIC_PATH}/{name}")
        assert head.headers["content-length"] == answer.headers["content-length"]


async def test_nothing_beside_the_folder_is_served(app: FastAPI) -> None:
    async with behind(app) as http:
        for path in ("/../webui.py", "/%2e%2e/webui.py", "/"):
            assert (await http.get(webui.STATIC_PATH + path)).status_code == 404


async def test_a_stream_of_an_application_is_not_collected(app: FastAPI) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    app.get("/stream")(lambda: StreamingResponse(chunks(), media_type="text/event-stream"))
    async with behind(app) as http:
        assert (await http.get("/stream")).text == "data: 1\n\ndata: 2\n\n"


def script(name: str) -> str:
    return (webui.STATIC_FOLDER / name).read_text()


def test_the_scripts_know_every_option_and_its_default() -> None:
    listed = re.search(r"OPTIONS = \[(.*?)\]", script("host_form.js"), re.DOTALL)
    assert listed is not None
    assert tuple(re.findall(r'"(\w+)"', listed.group(1))) == OPTIONS
    shown = dict(re.findall(r'(xavier_\w+_budget): "(\w+)"', script("launch_section.js")))
    default = XavierOptions(enable_xavier_gpu=True)
    assert XavierOptions(enable_xavier_gpu=True, **shown) == default
    assert set(shown) == {"xavier_gpu_budget", "xavier_cpu_budget"}


def test_every_language_has_every_text() -> None:
    blocks = re.findall(r'^  "?([\w-]+)"?: \{(.*?)^  \},', script("texts.js"), re.DOTALL | re.M)
    keys = {language: set(re.findall(r"^    (\w+):", block, re.M)) for language, block in blocks}
    assert set(keys) == {"en", "zh", "zh-TW"}
    assert keys["en"] == keys["zh"] == keys["zh-TW"]
    assert len(keys["en"]) >= 13
