"""The declared metrics, their page, and the dashboard's expressions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xinference_xavier.metrics import LABELS, METRICS, PREFIX, Kind, Metric

ROOT = Path(__file__).parents[2]
BY_NAME = {metric.name: metric for metric in METRICS}
BASE_UNITS = {
    *("1", "seconds", "bytes", "tokens", "blocks", "rows", "requests", "jobs", "leases"),
    *("fetches", "faults", "replicas", "polls"),
}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_units_and_labels_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"xinference:xavier_[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
    assert metric.unit in BASE_UNITS
    stem = metric.name.removesuffix("_total")
    for unit in ("seconds", "bytes"):
        assert stem.endswith(unit) is (metric.unit == unit)
    assert not re.search(r"ratio|percent|per_|rate|milli|_mb|_gb", metric.name)
    assert metric.help.endswith(".")
    assert set(metric.labels) <= set(LABELS)
    assert metric.labels == () or metric.labels[:2] == ("model", "replica")
    assert len(metric.labels) <= 3
    assert len({value for value, _ in metric.series}) == len(metric.series)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(METRICS)


def table(heading: str) -> list[list[str]]:
    text = (ROOT / "docs" / "metrics.md").read_text().partition(heading + "\n")[2]
    rows = text.partition("\n## ")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_page_lists_what_is_declared() -> None:
    assert table("## All of them") == [
        [f"`{m.name}`", m.kind.value, m.unit, ", ".join(m.labels) or "–", m.help] for m in METRICS
    ]
    assert table("## Labels") == [[f"`{name}`", text] for name, text in LABELS.items()]


# -- the dashboard ------------------------------------------------------------------------------

SELECTOR = re.compile(r"(xinference:xavier_\w+)(?:\{([^}]*)\})?(\[[^\]]*\])?")
MATCHER = re.compile(r'^(\w+)(=|!=|=~|!~)"[^"]*"$')


def printed() -> dict[str, Any]:
    command = [sys.executable, "-m", "xinference_xavier.host.dashboard"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
    loaded: dict[str, Any] = json.loads(made.stdout)
    return loaded


BOARD = printed()
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
LEGENDS = [target["legendFormat"] for panel in BOARD["panels"] for target in panel["targets"]]


def problems(expression: str) -> list[str]:
    """What is wrong with an expression of sums, rates and selectors of our metrics."""
    found = []
    if expression.count("(") != expression.count(")"):
        found.append("brackets do not match")
    selectors = list(SELECTOR.finditer(expression))
    if not selectors:
        found.append("no metric")
    labels = {label for m in selectors if m[1] in BY_NAME for label in BY_NAME[m[1]].labels}
    for match in selectors:
        name, matchers, window = match.groups()
        metric = BY_NAME.get(name)
        if metric is None:
            found.append(f"{name} is not declared")
            continue
        for matcher in (matchers or "").split(", "):
            parts = MATCHER.match(matcher)
            if parts is None or parts[1] not in metric.labels:
                found.append(f"{matcher} does not select series of {name}")
        called = re.search(r"(rate|increase)\($", expression[: match.start()])
        if bool(called) is not (metric.kind is Kind.COUNTER) or bool(window) is not bool(called):
            found.append(f"{name} is a {metric.kind.value}")
    for group in re.findall(r"by \(([^)]*)\)", expression):
        found += [f"no label {label}" for label in group.split(", ") if label not in labels]
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_use_declared_metrics_and_labels(expression: str) -> None:
    assert problems(expression) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum by (model) (xinference:xavier_rows", "brackets"),
        ("sum by (model) (up)", "no metric"),
        ('sum by (model) (xinference:xavier_row{model="m"})', "not declared"),
        ('sum by (model) (xinference:xavier_rows{kind="m"})', "does not select"),
        ('sum by (model) (rate(xinference:xavier_rows{tier="cpu"}[5m]))', "is a gauge"),
        ('sum by (model) (xinference:xavier_requests_total{model="m"})', "is a counter"),
        ('sum by (tier) (rate(xinference:xavier_requests_total{model="m"}[5m]))', "no label tier"),
    ],
)
def test_the_check_finds_mistakes(expression: str, problem: str) -> None:
    assert any(problem in found for found in problems(expression))


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for expression, legend in zip(EXPRESSIONS, LEGENDS, strict=True):
        kept = {label for g in re.findall(r"by \(([^)]*)\)", expression) for label in g.split(", ")}
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == kept, expression


def test_panels_have_titles_places_and_units_of_their_own() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(
        panel["description"] and "unit" in panel["fieldConfig"]["defaults"] for panel in panels
    )
    models = next(v for v in BOARD["templating"]["list"] if v["name"] == "model")
    name, label = re.match(r"label_values\((\S+), (\w+)\)", models["query"]["query"]).groups()
    assert label in BY_NAME[name].labels
    assert name.startswith(PREFIX)
