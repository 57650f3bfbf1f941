"""The panel's changing part: fields and buttons, each change behind a confirmation.

Covers: Gradio components and their events. Does not cover what is done (``actions.py``), which
asks for the person's scope again at every call, whatever the page shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from .access import SCOPE_KEY, Access
from .actions import Actions, Outcome
from .render import said_html

#: What is asked before a change; the first word is what the confirming button says.
_QUESTIONS = {
    "clear": "Clear: forget every snapshot of {model}? Rows in use go when they are released.",
    "resize": "Resize: give {model} other budgets? Shrinking drops or demotes what does not fit.",
    "pause": "Pause: let {model} store no new blocks? What is stored stays and is used.",
    "resume": "Resume: let {model} store new blocks again?",
}

#: For all events: no queue, and so no stream that stays open; not part of a public API.
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def access_of(request: gr.Request) -> Access | None:
    """The access that ``gate.py`` has put into the request's scope."""
    inner = request.request
    found: Access | None = None if inner is None else inner.scope.get(SCOPE_KEY)
    return found


@dataclass(frozen=True)
class Steering:
    """Components that others need. ``changing``: those that need the scope to change. ``asking``:
    what shows a question."""

    note: gr.HTML
    changing: list[Any]
    model: gr.Dropdown
    asking: list[Any]

    async def allow(self, actions: Actions, request: gr.Request) -> list[Any]:
        """Values for ``[note, *changing]``: enabled for those who may."""
        refused = await actions.why_not(access_of(request))
        enabled = not refused
        said = said_html([refused], bad=True) if refused else ""
        return [said, *(gr.update(interactive=enabled) for _ in self.changing)]

    def offer_pause(self, button: gr.Button, drawer: gr.Accordion) -> None:
        """Let ``button`` ask what the one that pauses stores asks, and open ``drawer`` for it."""
        ask = _ask("pause")
        button.click(
            lambda model_uid: (*ask(model_uid), gr.update(open=True)),
            self.model,
            [*self.asking, drawer],
            **QUIET,
        )


def build(actions: Actions, model: gr.Dropdown) -> Steering:
    """Place the components where the caller's context is, for the model chosen in ``model``."""
    note = gr.HTML(elem_classes="x-panel")
    with gr.Row():
        gpu = gr.Textbox(label="GPU budget of a replica", placeholder="such as 2GiB", scale=2)
        cpu = gr.Textbox(label="CPU budget of a replica", placeholder="such as 32GiB", scale=2)
        resize = gr.Button("Resize budgets…", scale=1)
    with gr.Row():
        clear = gr.Button("Clear snapshots…")
        pause = gr.Button("Pause stores…")
        resume = gr.Button("Resume stores…")
    with gr.Row():
        prompt = gr.Textbox(label="Prompt to look up", lines=2, max_lines=8, scale=4)
        lookup = gr.Button("Look up", scale=1)
    with gr.Group(visible=False) as confirm:
        question = gr.HTML(elem_classes="x-panel x-question")
        with gr.Row():
            yes = gr.Button("Yes", variant="stop", elem_id="x-yes")
            no = gr.Button("Cancel", elem_id="x-no")
    said = gr.HTML(elem_classes="x-panel", elem_id="x-outcome")
    pending = gr.State("")

    asking = [pending, confirm, question, yes, said]
    for button, kind in (
        (clear, "clear"),
        (resize, "resize"),
        (pause, "pause"),
        (resume, "resume"),
    ):
        button.click(_ask(kind), model, asking, **QUIET)
    no.click(lambda: ("", gr.update(visible=False)), None, [pending, confirm], **QUIET)
    yes.click(_perform(actions), [pending, model, gpu, cpu], [pending, confirm, said], **QUIET)
    lookup.click(_look_up(actions), [model, prompt], said, **QUIET)
    changing = [gpu, cpu, resize, clear, pause, resume, prompt, lookup]
    return Steering(note, changing, model, asking)


def _ask(kind: str) -> Callable[[str | None], tuple[Any, ...]]:
    """Show the question; nothing is done yet."""

    def ask(model_uid: str | None) -> tuple[Any, ...]:
        text = _QUESTIONS[kind].format(model=model_uid)
        shown = gr.update(visible=True)
        return kind, shown, said_html([text]), gr.update(value=f"Yes, {kind}"), ""

    return ask


def _perform(actions: Actions) -> Callable[..., Any]:
    async def perform(
        kind: str, model_uid: str | None, gpu: str, cpu: str, request: gr.Request
    ) -> tuple[Any, ...]:
        access, uid = access_of(request), model_uid or ""
        if kind == "clear":
            outcome = await actions.clear(access, uid)
        elif kind == "resize":
            outcome = await actions.resize(access, uid, gpu, cpu)
        elif kind in ("pause", "resume"):
            outcome = await actions.pause(access, uid, kind == "pause")
        else:
            outcome = Outcome(["Nothing is waiting for a confirmation."], bad=True)
        return "", gr.update(visible=False), said_html(outcome.sentences, outcome.bad)

    return perform


def _look_up(actions: Actions) -> Callable[..., Any]:
    async def look_up(model_uid: str | None, prompt: str, request: gr.Request) -> str:
        outcome = await actions.lookup(access_of(request), model_uid or "", prompt)
        return said_html(outcome.sentences, outcome.bad)

    return look_up
