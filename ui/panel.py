"""The panel: its layout, and what a viewer's timer does.

Imported when the panel is first opened, since Gradio takes seconds to import. Covers components
and events. Does not cover content (``snapshot.py``) or changes (``steering.py``). A tick reads
what the one sampler keeps: viewers cost no question to the cluster, and a paused or hidden page
costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from fastapi import FastAPI

from xinference_xavier.host.advisor import Advice, advise
from xinference_xavier.host.parts import Parts

from . import render, steering
from .actions import Actions
from .gate import STATIC
from .snapshot import PLOTS, Pictures
from .steering import QUIET

TITLE = "Xavier: snapshot cache"
WINDOWS = [("5 min", 300), ("15 min", 900), ("1 hour", 3600)]
INTERVALS = [("1 s", 1), ("2 s", 2), ("5 s", 5), ("30 s", 30)]

_SYSTEM_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_SYSTEM_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def mount(app: FastAPI, path: str, parts: Parts) -> None:
    """Mount the panel on ``app``. Call it on the event loop that will serve it."""
    blocks = build(Pictures(parts.sampler, _advisor(parts)), Actions(parts.admin))
    gr.mount_gradio_app(
        app,
        blocks,
        path,
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        css_paths=[STATIC / "panel.css"],
        head=f"<script>{(STATIC / 'panel.js').read_text('utf-8')}</script>",
    )


def theme() -> gr.themes.Base:
    """Fonts of the viewer's own system: nothing is fetched for them."""
    font = gr.themes.Font
    return gr.themes.Base(
        primary_hue=gr.themes.colors.sky,
        neutral_hue=gr.themes.colors.slate,
        font=[font(name) for name in _SYSTEM_FONTS],
        font_mono=[font(name) for name in _SYSTEM_MONO],
    )


def _advisor(parts: Parts) -> Callable[[str], Sequence[Advice]]:
    def advice(model_uid: str) -> list[Advice]:
        latest = parts.sampler.latest
        models = latest.models if latest is not None else []
        return [
            each
            for model in models
            if model.model_uid == model_uid
            for each in advise(model, parts.sampler.history(model_uid))
        ]

    return advice


def build(pictures: Pictures, actions: Actions) -> gr.Blocks:
    """The page. Every viewer has a timer, a window and a pause of their own."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML("<h1>Snapshot cache</h1>", elem_classes="x-panel")
        with gr.Row():
            # Gradio keeps the choices of each page in memory, and forgets them with the process:
            # a page that outlives a relaunch sends a model that is no choice of its new session.
            model = gr.Dropdown(
                label="Model", choices=[], allow_custom_value=True, scale=3, min_width=220
            )
            window = gr.Radio(WINDOWS, value=300, label="Plots show the last", scale=2)
            interval = gr.Radio(INTERVALS, value=2, label="Refresh every", scale=2)
            paused = gr.Checkbox(label="Pause this page", elem_id="x-pause", scale=1, min_width=120)
        status = gr.HTML(elem_classes="x-panel x-status", elem_id="x-status")
        empty = gr.HTML(elem_classes="x-panel", elem_id="x-empty", visible=False)
        with gr.Column(visible=False) as content:
            shown, offer = _content()
            with gr.Accordion("Steer this cache", open=False, elem_id="x-steer") as drawer:
                steer = steering.build(actions, model)
            steer.offer_pause(offer, drawer)
        timer = gr.Timer(2)
        known = gr.State([])

        refresh = _refresh(pictures)
        inputs, outputs = [model, window, known], [status, empty, content, model, known, *shown]
        timer.tick(refresh, inputs, outputs, **QUIET)
        for control in (model, window):
            control.change(refresh, inputs, outputs, **QUIET)
        paused.change(lambda off: gr.Timer(active=not off), paused, timer, **QUIET)
        interval.change(lambda seconds: gr.Timer(value=seconds), interval, timer, **QUIET)

        async def load(request: gr.Request) -> list[Any]:
            wanted = request.query_params.get("model")
            said, *enabled = await steer.allow(actions, request)
            return [*refresh(wanted, 300, []), said, *enabled, enabled[0]]

        blocks.load(load, None, [*outputs, steer.note, *steer.changing, offer], **QUIET)
    return blocks


def _content() -> tuple[list[Any], gr.Button]:
    """Components of one model in the order of ``_refresh``, and the button that advice offers."""
    figures = gr.HTML(elem_classes="x-panel", elem_id="x-figures")
    gr.HTML("<h2>Advice</h2>", elem_classes="x-panel")
    advice = gr.HTML(elem_classes="x-panel", elem_id="x-advice")
    with gr.Row(visible=False, elem_id="x-offered") as offered:
        offer = gr.Button("Pause stores as advised…", elem_id="x-offer", scale=0, min_width=240)
    gr.HTML("<h2>Over time</h2>", elem_classes="x-panel")
    drawings, tables = [], []
    for first in range(0, PLOTS, 2):
        with gr.Row():
            for number in (first, first + 1):
                with gr.Column(min_width=340):
                    drawings.append(gr.HTML(elem_classes="x-panel", elem_id=f"x-plot-{number}"))
                    with gr.Accordion("The same as a table", open=False):
                        tables.append(gr.HTML(elem_classes="x-panel", elem_id=f"x-table-{number}"))
    gr.HTML("<h2>Replicas</h2>", elem_classes="x-panel")
    replicas = gr.HTML(elem_classes="x-panel", elem_id="x-replicas")
    gr.HTML("<h2>Events</h2>", elem_classes="x-panel")
    events = gr.HTML(elem_classes="x-panel", elem_id="x-events")
    return [figures, advice, offered, *drawings, *tables, replicas, events], offer


def _refresh(pictures: Pictures) -> Callable[[str | None, float, list[str]], list[Any]]:
    def refresh(model_uid: str | None, seconds: float, known: list[str]) -> list[Any]:
        """One viewer's page now. A chosen model that is gone gives way to the first one."""
        uids = pictures.models()
        chosen = model_uid if model_uid in uids else next(iter(uids), None)
        # An open list of models must not close at each tick.
        same = uids == known and chosen == model_uid
        dropdown = gr.skip() if same else gr.update(choices=uids, value=chosen)
        picture = pictures.of(chosen, seconds) if chosen is not None else None
        head = [render.status_html(pictures.status())]
        if picture is None:
            shown = [gr.update(value=render.empty_html(), visible=True), gr.update(visible=False)]
            return [*head, *shown, dropdown, uids, *([gr.skip()] * (2 * PLOTS + 5))]
        parts = [picture.figures, picture.advice, gr.update(visible=picture.offers_pause)]
        parts += [*picture.drawings, *picture.tables, picture.replicas, picture.events]
        shown = [gr.update(visible=False), gr.update(visible=True)]
        return [*head, *shown, dropdown, uids, *parts]

    return refresh
