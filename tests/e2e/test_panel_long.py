"""Two panels open for ten minutes: one sampler asks for both, and nothing grows.

``XAVIER_PANEL_MINUTES`` is for trying it in less time.
"""

from __future__ import annotations

import os
import re
import time

import psutil
import pytest
from conversation import answer
from playwright.sync_api import Browser, Page
from server import Xinference, wait_until

from xinference_xavier.metrics import PREFIX

MINUTES = float(os.environ.get("XAVIER_PANEL_MINUTES", "10"))
#: Until then pages, plots and buffers take their places.
WARM_SECONDS = 60.0
FIRST_VISIT_MS = 120_000
#: An hour of history takes 4 MB a model (docs/performance.md); the allocator keeps some, too.
GROWTH_BYTES = 24 * 2**20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 900)]


def polls(server: Xinference) -> float:
    found = re.search(
        rf"^{PREFIX}sampler_polls_total\S* (\S+)$", server.client.get("/metrics").text, re.M
    )
    assert found
    return float(found.group(1))


def api_process(server: Xinference) -> psutil.Process:
    """The process that listens where the panel is served."""
    port = int(server.url.rpartition(":")[2])

    def listens(process: psutil.Process) -> bool:
        return any(
            c.status == psutil.CONN_LISTEN and c.laddr.port == port
            for c in process.net_connections("tcp")
        )

    return next(process for process in server.family() if listens(process))


def shown_time(page: Page) -> str:
    return page.locator("#x-status").inner_text()


def test_two_panels_open_for_long(chromium: Browser, server: Xinference, cached_model: str) -> None:
    with chromium.new_context() as first, chromium.new_context() as second:
        pages = [context.new_page() for context in (first, second)]
        for page in pages:
            page.goto(f"{server.url}/xavier/?model={cached_model}", timeout=FIRST_VISIT_MS)
            page.wait_for_selector("#x-figures dl", timeout=FIRST_VISIT_MS)
        process = api_process(server)
        watch(server, cached_model, pages, WARM_SECONDS)
        began, before, resident = time.monotonic(), polls(server), process.memory_info().rss
        threads = process.num_threads()
        watch(server, cached_model, pages, 60 * MINUTES - WARM_SECONDS)
        seconds, asked = time.monotonic() - began, polls(server) - before
        grown = process.memory_info().rss - resident
        print(f"{asked:.0f} polls in {seconds:.0f} s; {grown / 2**20:+.1f} MiB resident")
        # One every two seconds, whoever watches; a busy machine may lag.
        assert 0.7 * seconds / 2 <= asked <= seconds / 2 + 2
        assert grown < GROWTH_BYTES
        assert process.num_threads() <= threads + 2


def watch(server: Xinference, uid: str, pages: list[Page], seconds: float) -> None:
    """Let both pages run beside some requests; both go on showing what is new."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        told = [shown_time(page) for page in pages]
        answer(server, uid, number % 4)
        number += 1
        for page in pages:
            page.wait_for_timeout(5000)
        for page, text in zip(pages, told, strict=True):
            wait_until(lambda page=page, text=text: shown_time(page) != text, 30, server.tail)
