"""The panel's page as it is served: nothing from elsewhere, prefixes, changes and their scopes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from typing import Any

import httpx
import pytest
from cache_views import replica, stats
from fastapi import FastAPI
from panel_api import PanelApi
from test_panel_access import SAME, exchange, panel_of, streams_of
from xinference_xavier.ui import mount

from xinference_xavier.host import drain
from xinference_xavier.host.history import Sample
from xinference_xavier.host.view import ModelView, ReplicaView

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
    ),
]


def starting(uid: str) -> ModelView:
    """A model whose only replica has not reported yet."""
    replica = ReplicaView(
        replica=0,
        state="starting",
        address=None,
        pid=1,
        started=0.0,
        heartbeat_age_seconds=0.0,
        stale=False,
        options={},
        share=None,
        stats=None,
    )
    return ModelView(model_uid=uid, enabled=True, replicas=[replica])


class Page:
    """Calls the page's events as the browser does, by what starts them."""

    def __init__(self, http: httpx.AsyncClient, config: dict[str, Any]) -> None:
        self.http, self.config = http, config
        self.props = {item["id"]: item["props"] for item in config["components"]}

    def component(self, **wanted: Any) -> int:
        [found] = [i for i, p in self.props.items() if wanted.items() <= p.items()]
        return found

    def event(self, target: int | None, name: str) -> dict[str, Any]:
        matching = [
            e
            for e in self.config["dependencies"]
            if [target, name] in [list(t) for t in e["targets"]]
        ]
        [found] = matching
        return found

    async def call(self, event: dict[str, Any], *data: Any) -> httpx.Response:
        body = {"data": list(data), "fn_index": event["id"], "session_hash": "s"}
        return await self.http.post("/xavier/gradio_api/run/predict", json=body, headers=SAME)

    async def press(self, button: str, *data: Any) -> str:
        """Press a button and return all that the server answered, as text."""
        answer = await self.call(self.event(self.component(value=button), "click"), *data)
        assert answer.status_code == 200, answer.text
        return json.dumps(answer.json()["data"], ensure_ascii=False)

    async def load(self) -> str:
        return json.dumps((await self._load())[1], ensure_ascii=False)

    async def loaded(self, elem_id: str) -> Any:
        """What the page's load gives one component."""
        outputs, data = await self._load()
        return data[outputs.index(self.component(elem_id=elem_id))]

    async def _load(self) -> tuple[list[int], list[Any]]:
        [event] = [e for e in self.config["dependencies"] if e["targets"][0][1] == "load"]
        answer = await self.call(event)
        assert answer.status_code == 200, answer.text
        return event["outputs"], answer.json()["data"]


async def open_page(http: httpx.AsyncClient) -> Page:
    config = (await http.get("/xavier/config", headers=SAME)).json()
    return Page(http, config)


async def test_the_page_takes_nothing_from_elsewhere(open_api: PanelApi) -> None:
    async with open_api.client() as http:
        page = await http.get("/xavier/")
        theme = await http.get("/xavier/theme.css")
    own = r"(?!http://api/|data:|blob:)"
    loaded = re.findall(
        r"""<(?:script|link|img|iframe)[^>]*?(?:src|href)=["']([^"']+)""", page.text
    )
    assert loaded
    assert not [url for url in loaded if re.match(rf"(?:https?:)?//{own}", url)]
    assert not re.search(rf"url\(['\"]?{own}(?:https?:)?//", theme.text + page.text)
    assert '"analytics_enabled":false' in page.text
    assert "system-ui" in theme.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'self'" in policy


async def test_a_prefix_of_a_proxy_is_in_every_address(open_api: PanelApi) -> None:
    async with open_api.client(**{"X-Forwarded-Prefix": "/deep/prefix"}) as http:
        config = (await http.get("/xavier/config")).json()
        assert config["root"] == "http://api/deep/prefix/xavier"
        bare = await http.get("/xavier")
        # The browser sees the address with its prefix.
        seen = httpx.URL("http://api/deep/prefix/xavier").join(bare.headers["location"])
        assert seen == "http://api/deep/prefix/xavier/"
    async with open_api.client(**{"X-Forwarded-Prefix": "//evil.example"}) as http:
        config = (await http.get("/xavier/config")).json()
        assert config["root"] == "http://api/xavier"


async def test_an_empty_cluster_is_told_how_to_launch(open_api: PanelApi) -> None:
    async with open_api.client() as http:
        page = await open_page(http)
        said = await page.load()
    assert "xinference launch" in said
    assert "--enable-xavier-gpu" in said


async def test_a_model_is_shown_and_can_be_asked_for_in_the_address(open_api: PanelApi) -> None:
    async with open_api.client() as http:
        page = await open_page(http)
        open_api.show(starting("m<1>"), starting("n"))
        said = await page.load()
        assert "Replicas of m&lt;1&gt;" in said
        assert "Replicas of n" not in said
        [timer] = [i for i, p in page.props.items() if p.get("value") == 2 and "active" in p]
        answer = await page.call(page.event(timer, "tick"), "n", 300, None)
        assert "Replicas of n" in answer.text
        answer = await page.call(page.event(timer, "tick"), "gone", 300, None)
        assert "Replicas of m&lt;1&gt;" in answer.text


async def test_viewers_share_what_is_drawn(open_api: PanelApi) -> None:
    async with open_api.client() as http:
        page = await open_page(http)
        open_api.show(starting("m"))
        polls = open_api.api._app.state.xavier_sampler.polls
        for _ in range(5):
            await page.load()
        assert open_api.api._app.state.xavier_sampler.polls == polls


#: Each change, as a person presses for it, and what the replica is asked for then.
CHANGES = [
    ("Clear snapshots…", "clear", ("clear",)),
    ("Resize budgets…", "resize", ("resize", 2 * 2**30, 1024)),
    ("Pause stores…", "pause", ("pause", True)),
    ("Resume stores…", "resume", ("pause", False)),
]


@pytest.mark.parametrize(("button", "kind", "asked"), CHANGES)
async def test_a_change_is_confirmed_first(
    secured: PanelApi, button: str, kind: str, asked: tuple[Any, ...]
) -> None:
    async with secured.client() as http:
        await exchange(http, secured.tokens["admin"])
        page = await open_page(http)
        said = await page.press(button, "m")
        assert f"Yes, {kind}" in said
        assert secured.engine.asked == []
        said = await page.press("Yes", None, "m", "2GiB", " 1024 ")
    assert secured.engine.asked == [asked]
    assert "Replica 0" in said


async def test_harm_offers_to_pause_stores_and_nothing_else_does(secured: PanelApi) -> None:
    sampler = secured.api._app.state.xavier_sampler
    now, bad = time.monotonic(), stats(accounts__copy_seconds=90.0)
    async with secured.client() as http:
        await exchange(http, secured.tokens["admin"])
        page = await open_page(http)
        for ago, told in ((120.0, stats()), (0.0, bad)):
            view = ModelView(model_uid="m", enabled=True, replicas=[replica(stats=told)])
            sampler._keep(Sample(time.time() - ago, now - ago, [view]))
            assert ("pause stores until" in await page.load()) == (told is bad)
            assert (await page.loaded("x-offered"))["visible"] == (told is bad)
        asked = await page.press("Pause stores as advised…", "m")
        assert "Yes, pause" in asked
        assert '"open": true' in asked
        assert secured.engine.asked == []
        await page.press("Yes", None, "m", "", "")
    assert secured.engine.asked == [("pause", True)]


@pytest.mark.parametrize("who", ["reader", "key"])
async def test_who_may_only_read_changes_nothing(secured: PanelApi, who: str) -> None:
    async with secured.client() as http:
        await exchange(http, secured.tokens[who])
        page = await open_page(http)
        said = await page.load()
        assert "models:write" in said
        assert said.count('"interactive": false') == 9
        for button, kind, _ in CHANGES:
            await page.press(button, "m")
            assert "models:write" in await page.press("Yes", None, "m", "", ""), kind
        assert "models:write" in await page.press("Look up", "m", "a prompt")
    assert secured.engine.asked == []
    assert secured.failures == 0


async def test_who_may_change_finds_everything_enabled(secured: PanelApi) -> None:
    async with secured.client() as http:
        await exchange(http, secured.tokens["admin"])
        said = await (await open_page(http)).load()
        assert said.count('"interactive": true') == 9
        page = await open_page(http)
        found = await page.press("Look up", "m", "a prompt")
    assert secured.engine.asked == [("lookup", 100)]
    assert "100 tokens" in found
    assert "a peer 20" in found


@pytest.mark.parametrize(
    ("model_uid", "gpu", "words"),
    [
        ("m", "4 furlongs", "xavier_gpu_budget=&#x27;4 furlongs&#x27;"),
        ("m", "", "Give at least one a size"),
        ("nobody", "1GiB", "There is no model &#x27;nobody&#x27;"),
    ],
)
async def test_a_refusal_is_a_sentence(
    open_api: PanelApi, model_uid: str, gpu: str, words: str
) -> None:
    async with open_api.client() as http:
        page = await open_page(http)
        await page.press("Resize budgets…", model_uid)
        said = await page.press("Yes", None, model_uid, gpu, "")
    assert words in said
    assert "refused" in said
    assert open_api.engine.asked == []


async def test_replicas_that_could_not_are_named(open_api: PanelApi) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    open_api.places = [(0, open_api.address), (1, None), (2, nobody)]
    async with open_api.client() as http:
        page = await open_page(http)
        await page.press("Clear snapshots…", "m")
        said = await page.press("Yes", None, "m", "", "")
    assert "Replica 0: 42 snapshots forgotten; 2 are in use" in said
    assert "Replica 1 is still starting" in said
    assert "Replica 2 did not answer (ConnectionRefusedError" in said
    assert "refused" in said


async def test_without_gradio_a_sentence_says_what_to_install(
    open_api: PanelApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount.util, "find_spec", lambda name: None)
    async with open_api.client() as http:
        answer = await http.get("/xavier/")
    assert answer.status_code == 503
    assert "pip install 'xinference-xavier[ui]'" in answer.text


async def test_a_panel_that_failed_to_start_is_tried_again(
    open_api: PanelApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    panel = mount.Panel(panel_of(open_api)._parts)
    with monkeypatch.context() as patch:
        patch.setattr(mount, "PANEL", "no_such_module")
        with pytest.raises(ModuleNotFoundError):
            await panel._opened()
    assert "The panel does not start" in caplog.text
    assert isinstance(await panel._opened(), FastAPI)
    await panel.aclose()


async def test_streams_end_when_the_server_drains(open_api: PanelApi) -> None:
    """An open page holds a heartbeat, which alone would keep the server for minutes."""
    streams = streams_of(open_api)
    assert streams.end_all in drain._callbacks
    received: list[dict[str, Any]] = []
    alive = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        received.append(message)
        if message.get("body"):
            alive.set()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    path = "/xavier/gradio_api/heartbeat/s"
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": [(b"host", b"api")], "scheme": "http"}
    scope |= {"server": ("api", 80), "client": ("127.0.0.1", 1), "http_version": "1.1"}
    stream = asyncio.create_task(open_api.api._app(scope, receive, send))
    try:
        await asyncio.wait_for(alive.wait(), 60)
        streams.end_all()
        await asyncio.wait_for(stream, 5)
        assert received[-1].get("more_body", False) is False
        async with open_api.client() as http:
            answer = await http.get("/xavier/")
            assert (answer.status_code, answer.headers["connection"]) == (503, "close")
    finally:
        streams.draining = False
        stream.cancel()
