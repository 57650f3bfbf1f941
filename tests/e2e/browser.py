"""A real Chromium for the browser tests.

Covers: finding one, starting it through Playwright, and pages that record what they load. Does
not cover: what is on a page. Run as a program it prints the browser's version, or fails with the
sentence that the tests fail with; ``scripts/setup_browser.sh`` asks it that way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

#: Names one browser, before all others.
VARIABLE = "XAVIER_TEST_CHROMIUM"
#: Of distributions, in the order of preference.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: No sandbox, since tests run as root in containers; and nothing of its own goes to the network.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
]


class BrowserMissingError(RuntimeError):
    """No Chromium starts here; the text says what to do."""


def find_chromium() -> Path:
    """An executable that starts and says its version.

    Raises:
        BrowserMissingError: there is none.
    """
    tried = []
    for candidate in _candidates():
        if _version(candidate):
            return candidate
        tried.append(str(candidate))
    raise BrowserMissingError(
        f"The browser tests need Chromium, and none starts here (tried {', '.join(tried)}). Run "
        "`make setup` as root on Debian, or `.venv/bin/python -m playwright install --only-shell "
        f"chromium`, or set {VARIABLE} to the executable of one."
    )


def _candidates() -> Iterator[Path]:
    if os.environ.get(VARIABLE):
        yield Path(os.environ[VARIABLE])
        return
    yield from (Path(found) for found in map(shutil.which, NAMES) if found)
    # Where Playwright keeps its downloads; the shell has no window, and needs none.
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", "~/.cache/ms-playwright")).expanduser()
    yield from sorted(folder.glob("chromium_headless_shell-*/*/*headless*shell"), reverse=True)
    yield from sorted(folder.glob("chromium-*/*/chrome"), reverse=True)


def _version(executable: Path) -> str:
    """What ``--version`` prints; empty when it does not start."""
    command = [str(executable), "--version", "--no-sandbox"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


@contextlib.contextmanager
def start_chromium(**options: Any) -> Iterator[Browser]:
    """A headless Chromium until the block ends. ``options`` go to Playwright's ``launch``.

    Playwright keeps an event loop in this thread meanwhile, so no test that is a coroutine can
    run before the block has ended: use it for one test or one module, never for a session.

    Raises:
        BrowserMissingError: there is none.
    """
    executable = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, headless=True, args=ARGUMENTS, **options
        )
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    print(_version(find_chromium()))
