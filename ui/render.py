"""The panel's parts as HTML. Every text from outside is escaped here. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .charts import chart, legend
from .data import Figure, Table
from .series import Plot

LAUNCH = """xinference launch --model-name qwen2.5-instruct --model-engine vllm \\
    --size-in-billions 7 --model-format pytorch --replica 2 \\
    --enable-xavier-gpu --xavier-gpu-budget 2GiB --xavier-cpu-budget 32GiB"""


def figures_html(figures: Sequence[Figure]) -> str:
    """The row of plain numbers, which wraps."""
    return f'<dl class="x-figures">{"".join(map(_figure, figures))}</dl>'


def _figure(figure: Figure) -> str:
    alarm = ' class="x-alarm"' if figure.alarm else ""
    sign = '<span class="x-sign">look</span>' if figure.alarm else ""
    return (
        f"<div{alarm}><dt>{escape(figure.label)}{sign}</dt><dd>{escape(figure.value)}"
        f"<small>{escape(figure.note)}</small></dd></div>"
    )


def plot_html(plot: Plot) -> str:
    """Heading, sentence, drawing and legend of one plot."""
    return (
        f'<section class="x-plot"><h3>{escape(plot.title)} <span class="x-unit">'
        f"{escape(plot.unit)}</span></h3><p>{escape(plot.summary)}</p>{chart(plot)}{legend(plot)}"
        "</section>"
    )


def table_html(table: Table, empty: str = "Nothing yet.") -> str:
    """A table that scrolls by itself where the screen is narrow; a sentence when it is empty."""
    if not table.rows:
        return f'<p class="x-quiet">{escape(empty)}</p>'
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    # Scrolling by keyboard needs something to hold the focus, and that needs a name.
    return (
        f'<div class="x-scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">'
        f"<table><caption>{escape(table.caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(row: tuple[str, ...]) -> str:
    first, *rest = row
    return f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(c)}</td>" for c in rest)


def advice_html(sentences: Sequence[str]) -> str:
    """What the advisor says."""
    if not sentences:
        return '<p class="x-quiet">No advice: nothing suggests another budget yet.</p>'
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="x-advice">{items}</ul>'


def said_html(sentences: Sequence[str], bad: bool = False) -> str:
    """The outcome of an action."""
    kind = "x-said x-bad" if bad else "x-said"
    sign = '<span class="x-sign">refused</span> ' if bad else ""
    text = "<br>".join(escape(sentence) for sentence in sentences)
    return f'<p class="{kind}" role="status">{sign}{text}</p>' if sentences else ""


def empty_html() -> str:
    """What to do where no model keeps snapshots."""
    return (
        '<section class="x-empty"><h2>No model keeps snapshots yet</h2><p>Launch one with the '
        "switch of the web UI's launch dialog, or with a command such as this, and it appears here "
        f"within seconds:</p><pre><code>{escape(LAUNCH)}</code></pre><p>The same fields "
        "(<code>enable_xavier_gpu</code>, <code>xavier_gpu_budget</code>, "
        "<code>xavier_cpu_budget</code>) go into the body of <code>POST /v1/models</code>. Models "
        "that run already keep no snapshots: terminate and launch them again.</p></section>"
    )


def status_html(text: str) -> str:
    """The line under the controls."""
    return f"<p>{escape(text)}</p>"
