"""The Grafana dashboard that comes with the package, as text.

``python -m xinference_xavier.host.dashboard`` prints it, for Grafana's import.
"""

from __future__ import annotations

import sys
from importlib.resources import files


def dashboard() -> str:
    """The dashboard as JSON."""
    return files("xinference_xavier.host").joinpath("dashboard.json").read_text("utf-8")


if __name__ == "__main__":
    sys.stdout.write(dashboard())
