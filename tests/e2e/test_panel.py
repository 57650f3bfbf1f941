"""The panel in a real browser, on a real Xinference with authentication and a real model.

``XAVIER_SCREENSHOTS=1`` writes the pictures of ``docs/panel.md`` anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from conversation import answer
from playwright.sync_api import Browser, BrowserContext, Page, expect
from prefix_proxy import serve_below
from server import ROOT, Xinference, flags, wait_until

IMAGES = ROOT / "docs" / "images"
SCREENS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "narrow": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
#: Two prompts of 62 blocks fill the device tier, the third one has some of it demoted.
BUDGETS = {"xavier_gpu_budget": "8MiB", "xavier_cpu_budget": "64MiB"}
#: Gradio is imported by the first visit, and the machine may be busy.
FIRST_VISIT_MS = 120_000
MODEL = "shown"


@pytest.fixture(scope="module")
def shown(secured_server: Xinference, tiny_model: Path) -> str:
    """Uid of a model with small tiers, loaded; nothing has been asked of it."""
    options = flags({**BUDGETS, "num_gpu_blocks_override": 136})
    launched = secured_server.launch(MODEL, tiny_model, "--enable-xavier-gpu", *options)
    assert launched.returncode == 0, launched.stderr
    secured_server.wait_ready(MODEL)
    return MODEL


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    with chromium.new_context(**SCREENS["light"]) as made:  # type: ignore[arg-type]
        made.set_default_timeout(30_000)
        yield made


def log_in(page: Page, server: Xinference) -> None:
    """Through Xinference's own login page, which keeps its token in this tab."""
    page.goto(f"{server.url}/login")
    page.get_by_placeholder("Username").fill("admin")
    page.get_by_placeholder("Password").fill("Str0ng-pass-word!")
    page.locator("button[type=submit]").first.click()
    page.wait_for_function("sessionStorage.getItem('token')")


def open_panel(page: Page, address: str) -> None:
    page.goto(f"{address}/xavier/?model={MODEL}", timeout=FIRST_VISIT_MS)
    page.wait_for_selector("#x-figures dl", timeout=FIRST_VISIT_MS)


def figure(page: Page, label: str) -> str:
    """Value of one number of the first row."""
    card = page.locator("#x-figures dl > div", has=page.locator("dt", has_text=label))
    return re.sub(r"\s+", " ", card.locator("dd").first.inner_text())


def first_number(text: str) -> float:
    found = re.search(r"-?[\d,.]+", text)
    assert found, text
    return float(found.group().replace(",", ""))


def wait_for_figure(page: Page, label: str, least: float, most: float = float("inf")) -> None:
    deadline = time.monotonic() + 40
    while not least <= first_number(figure(page, label)) <= most:
        assert time.monotonic() < deadline, f"{label}: {figure(page, label)}"
        page.wait_for_timeout(250)


def take_screenshots(browser: Browser, context: BrowserContext, server: Xinference) -> None:
    cookies = context.cookies(f"{server.url}/xavier/")
    for name, options in SCREENS.items():
        with browser.new_context(**options) as made:  # type: ignore[arg-type]
            made.add_cookies(cookies)  # type: ignore[arg-type]
            page = made.new_page()
            open_panel(page, server.url)
            # Every control and every word is on the screen: nothing needs a wider one.
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= options["viewport"]["width"], name  # type: ignore[index]
            if os.environ.get("XAVIER_SCREENSHOTS"):
                IMAGES.mkdir(exist_ok=True)
                page.screenshot(path=IMAGES / f"panel-{name}.png", full_page=True)


def test_a_person_watches_a_cache_and_clears_it(
    chromium: Browser, context: BrowserContext, secured_server: Xinference, shown: str
) -> None:
    page = context.new_page()
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page.goto(f"{secured_server.url}/xavier/", timeout=FIRST_VISIT_MS)
    expect(page.locator("#say")).to_contain_text("not logged in")
    log_in(page, secured_server)
    asked.clear()
    open_panel(page, secured_server.url)
    assert first_number(figure(page, "GPU snapshots")) <= 1

    answer(secured_server, shown, 0)
    wait_for_figure(page, "GPU snapshots", least=60)
    for number in (1, 2, 3, 0, 1):
        answer(secured_server, shown, number)
    wait_for_figure(page, "CPU snapshots", least=60)
    wait_for_figure(page, "CPU hits", least=1)
    assert "in all" in figure(page, "Demotions")
    wait_for_figure(page, "Tokens saved", least=1900)

    charts = page.locator("#x-plot-0 svg[role=img]")
    expect(charts).to_have_count(1)
    page.get_by_role("button", name="The same as a table").first.click()
    expect(page.locator("#x-table-0 caption")).to_be_visible()
    # A tick does not close what a person has opened.
    page.wait_for_timeout(3000)
    expect(page.locator("#x-table-0 tbody tr").first).to_be_visible()
    expect(page.locator("#x-replicas")).to_contain_text("running")
    take_screenshots(chromium, context, secured_server)

    assert {urlsplit(url).netloc for url in asked if url.startswith("http")} == {
        urlsplit(secured_server.url).netloc
    }
    clear(page)
    wait_for_figure(page, "GPU snapshots", least=0, most=0)
    wait_for_figure(page, "CPU snapshots", least=0, most=0)


def clear(page: Page) -> None:
    """Press for it, change one's mind, then confirm."""
    page.get_by_role("button", name="Steer this cache").click()
    page.get_by_role("button", name="Clear snapshots…").click()
    page.get_by_role("button", name="Cancel").click()
    assert first_number(figure(page, "GPU snapshots")) > 0
    page.get_by_role("button", name="Clear snapshots…").click()
    page.get_by_role("button", name="Yes, clear").click()
    expect(page.locator("#x-outcome")).to_contain_text("snapshots forgotten")


@pytest.mark.slow
def test_a_paused_page_asks_nothing(
    context: BrowserContext, secured_server: Xinference, shown: str
) -> None:
    page = context.new_page()
    log_in(page, secured_server)
    open_panel(page, secured_server.url)
    page.get_by_label("Pause this page").check()
    page.wait_for_timeout(2500)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(5000)
    assert asked == []
    page.get_by_label("Pause this page").uncheck()
    page.wait_for_timeout(4000)
    assert asked


@pytest.mark.slow
def test_a_session_that_ends_is_told_and_leads_to_no_ban(
    context: BrowserContext, secured_server: Xinference, shown: str
) -> None:
    page = context.new_page()
    log_in(page, secured_server)
    open_panel(page, secured_server.url)
    [cookie] = context.cookies(f"{secured_server.url}/xavier/")
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/xavier")
    # A lost cookie is replaced by the token that Xinference's own pages keep in this tab.
    context.clear_cookies()
    page.wait_for_timeout(4000)
    assert context.cookies(f"{secured_server.url}/xavier/")
    expect(page.locator("#x-ended")).to_have_count(0)
    page.evaluate("sessionStorage.removeItem('token')")
    context.clear_cookies()
    page.wait_for_timeout(13_000)
    expect(page.locator("#x-ended")).to_contain_text("Log in again")
    assert secured_server.client.get("/v1/models").status_code == 200


@pytest.mark.slow
def test_the_panel_works_below_a_prefix(
    context: BrowserContext, secured_server: Xinference, shown: str
) -> None:
    page = context.new_page()
    with serve_below("/llm", secured_server.url) as address:
        page.goto(f"{address}/xavier", timeout=FIRST_VISIT_MS)
        expect(page.locator("#login a")).to_have_attribute("href", "/llm/login")
        # Where the host's own pages keep it; they have no prefix, and are not asked here.
        page.evaluate("token => sessionStorage.setItem('token', token)", secured_server.token)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        open_panel(page, address)
        status = page.locator("#x-status").inner_text()
        expect(page.locator("#x-status")).not_to_have_text(status)
        [cookie] = context.cookies(f"{address}/xavier/")
        assert cookie["path"] == "/llm/xavier"
        assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
        page.close()


def relaunch_seconds(server: Xinference) -> float:
    """Have the API replaced by a new process; how long the old one took to drain."""
    operation = server.client.post("/v1/api/relaunch").raise_for_status().json()
    place = f"/v1/api-relaunches/{operation['operation_id']}"
    began = None

    def ended() -> bool:
        nonlocal began
        status = server.client.get(place).json()["status"]
        assert status != "failed"
        if status == "draining" and began is None:
            began = time.monotonic()
        return bool(status == "succeeded")

    wait_until(ended, 180, server.tail, poll_seconds=0.1)
    return 0.0 if began is None else time.monotonic() - began


def hold_stream(server: Xinference) -> tuple[httpx.Client, Iterator[str]]:
    """A panel's stream that its client would hold for ever."""
    client = httpx.Client(timeout=60)
    request = client.build_request("GET", f"{server.url}/xavier/gradio_api/heartbeat/s")
    lines = client.send(request, stream=True).iter_lines()
    assert "ALIVE" in next(lines)
    return client, lines


@pytest.mark.slow
def test_an_open_panel_delays_no_end(tmp_path: Path, context: BrowserContext) -> None:
    """Neither an API relaunch nor Ctrl-C waits for open pages and their streams."""
    server = Xinference(tmp_path / "ending")
    try:
        pages = [context.new_page() for _ in range(2)]
        for page in pages:
            page.goto(f"{server.url}/xavier/", timeout=FIRST_VISIT_MS)
            page.wait_for_selector("#x-empty section", timeout=FIRST_VISIT_MS)
        client, lines = hold_stream(server)
        with contextlib.closing(client):
            relaunched = relaunch_seconds(server)
            deque(lines, 0)  # returns when the stream has ended
        # The pages go on with the new process.
        told = pages[0].locator("#x-status").inner_text()
        expect(pages[0].locator("#x-status")).not_to_have_text(told, timeout=FIRST_VISIT_MS)

        client, lines = hold_stream(server)
        with contextlib.closing(client):
            began = time.monotonic()
            server.processes[0].send_signal(signal.SIGINT)
            deque(lines, 0)
            ended = time.monotonic() - began
        server.processes[0].wait(60)
        took = time.monotonic() - began
    finally:
        assert server.stop() == []
    print(f"drained in {relaunched:.1f} s; Ctrl-C: stream {ended:.1f} s, server {took:.1f} s")
    assert relaunched < 10
    assert ended < 5
    assert took < 20
