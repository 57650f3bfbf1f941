"""Xinference's web UI as a person uses it: logging in, the launch dialog, the running models.

Covers: where things are on the released pages, in their own words. Does not cover: what they
should say. Page texts are those of the UI in English; ``lang`` sets another language before the
page loads.
"""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Browser, Locator, Page, Request
from server import Xinference

#: The first user that ``server.Xinference`` makes.
USER = ("admin", "Str0ng-pass-word!")
#: A busy machine takes its time to draw a page.
TIMEOUT_MS = 60_000

#: The button of the card that shows a model's name.
CARD_BUTTON = (
    '//*[normalize-space()="{name}"]/ancestor::*[.//button[normalize-space()!=""]][1]'
    '//button[normalize-space()!=""]'
)


class WebUI:
    """One tab of a browser. ``posts`` and ``said`` record what it sends and logs."""

    def __init__(self, browser: Browser, server: Xinference, **options: Any) -> None:
        self.server = server
        self.page: Page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.posts: list[Request] = []
        self.said: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", self._record)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def log_in(self) -> None:
        """By the login page; returns on the page behind it."""
        self.page.goto(f"{self.server.url}/login")
        self.page.get_by_placeholder("Username").fill(USER[0])
        self.page.get_by_placeholder("Password").fill(USER[1])
        self.page.locator("form button[type=submit]").click()
        self.page.wait_for_url(lambda url: "/login" not in url)

    def speak(self, lang: str) -> None:
        """Choose the UI's language; counts from the next page on."""
        self.page.evaluate("lang => localStorage.setItem('app_locale', lang)", lang)

    def open_launch_dialog(self, name: str) -> LaunchDialog:
        """The launch dialog of a language model, with its latest configuration loaded."""
        self.page.goto(f"{self.server.url}/launch-model/llm")
        self.page.locator("xpath=" + CARD_BUTTON.format(name=name)).last.click()
        dialog = LaunchDialog(self.page)
        dialog.form.wait_for()
        return dialog

    def sent_to(self, path: str) -> list[Any]:
        """Bodies of the POSTs to one route so far."""
        return [json.loads(request.post_data or "null") for request in self.posts
                if request.url == self.server.url + path]  # fmt: skip

    def panel_link(self) -> Locator:
        return self.page.locator("a.xavier-panel-link")

    def _record(self, request: Request) -> None:
        if request.method == "POST":
            self.posts.append(request)


class LaunchDialog:
    """The open launch dialog, and our section in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.form = page.locator('[role="dialog"] form')
        self.section = self.form.locator(".xavier-launch")
        self.switch = self.section.get_by_role("switch")
        self.gpu_budget = self.section.locator("input").nth(0)
        self.cpu_budget = self.section.locator("input").nth(1)
        self.share = self.section.locator("select")
        # Not by their roles, which they have only while they say something.
        self.problem = self.section.locator(".xavier-launch-problem")
        self.warnings = self.section.locator(".xavier-launch-warnings")
        self.autostart = page.locator("label", has_text="Autostart").get_by_role("switch")
        self.deploy = page.locator('[role="dialog"] button[type="submit"]')

    def rows(self) -> dict[str, str]:
        """The host's own rows of additional parameters."""
        inputs = self.form.locator('[data-slot="collapsible-content"] input')
        texts = inputs.evaluate_all("all => all.map(one => one.value)")
        return dict(zip(texts[::2], texts[1::2], strict=False))

    def choose_engine(self, name: str) -> None:
        field = self.form.locator(
            'xpath=//label[starts-with(., "Model Engine")]/following-sibling::*[1]'
        )
        field.locator(".border-input").click()
        options = self.page.locator('[data-slot="select-option"]')
        options.filter(has_text=name).first.click()
