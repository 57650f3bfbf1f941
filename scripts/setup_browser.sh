#!/usr/bin/env bash
# Bring a Chromium for the browser tests: the distribution's package where apt and root are there,
# Playwright's own download elsewhere. Does nothing when a browser is there already.
# Usage: scripts/setup_browser.sh ENV_FOLDER
# Never fails: everything but the browser tests works without one, and those say what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1/bin/python

say() { echo "setup: $*" >&2; }

# The places where the tests look, see there.
have_browser() { "$python" tests/e2e/browser.py >/dev/null 2>&1; }

from_apt() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing the package chromium, which the browser tests start (1 to 3 minutes)"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } \
        >/dev/null 2>&1 && have_browser
}

from_playwright() {
    say "downloading Playwright's Chromium, which the browser tests start (1 to 3 minutes)"
    "$python" -m playwright install --only-shell chromium >/dev/null 2>&1 && have_browser
}

if ! have_browser && ! from_apt && ! from_playwright; then
    say "no Chromium: neither apt-get nor Playwright's download brought one that starts. The browser" \
        "tests will fail until you install one and, if it is not on PATH, set XAVIER_TEST_CHROMIUM to it."
fi
