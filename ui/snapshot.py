"""One picture of a model for every viewer: made once per sample, whoever looks.

Covers: which parts there are, and keeping the latest pictures. Does not cover their content
(``data.py``, ``series.py``) or layout (``panel.py``). Runs on the event loop of Xinference's API
process; reads the sampler's memory and asks nobody.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xinference_xavier.host.advisor import Advice
from xinference_xavier.host.sampler import Sampler

from . import data, render
from .series import plots
from .units import clock_text, count_text

#: Plots of the panel; each has a drawing and a table.
PLOTS = 4
#: Pictures kept: one for each model and window that somebody looks at.
_MOST_KEPT = 64


@dataclass(frozen=True)
class Picture:
    """HTML of one model over one window."""

    figures: str
    advice: str
    #: Whether the advice offers to pause stores.
    offers_pause: bool
    drawings: tuple[str, ...]
    tables: tuple[str, ...]
    replicas: str
    events: str


class Pictures:
    """Draws from ``sampler``. ``advise`` gives the advice for a model's uid."""

    def __init__(self, sampler: Sampler, advise: Callable[[str], Sequence[Advice]]) -> None:
        self._sampler = sampler
        self._advise = advise
        self._kept: OrderedDict[tuple[str, float], tuple[float, Picture]] = OrderedDict()
        #: How many were drawn, and not taken from memory.
        self.drawn = 0

    def models(self) -> list[str]:
        """Uids of the models that keep snapshots now, sorted."""
        latest = self._sampler.latest
        return sorted(model.model_uid for model in latest.models) if latest is not None else []

    def status(self) -> str:
        """How old the numbers are, and how often they are asked for."""
        latest, every = self._sampler.latest, f"{self._sampler.interval_seconds:g} s"
        if latest is None:
            return f"No numbers yet; the cluster is asked every {every}."
        age = time.monotonic() - latest.monotonic
        late = age > 3 * self._sampler.interval_seconds + 5
        text = f"Numbers of {clock_text(latest.at)} UTC; the cluster is asked every {every}."
        return f"{text} They are {count_text(round(age))} s old: nobody answers." if late else text

    def of(self, model_uid: str, seconds: float) -> Picture | None:
        """The model over the last ``seconds``; None when it is not there."""
        latest = self._sampler.latest
        found = latest and next((m for m in latest.models if m.model_uid == model_uid), None)
        if latest is None or not found:
            return None
        key = (model_uid, seconds)
        kept = self._kept.get(key)
        if kept is None or kept[0] != latest.monotonic:
            kept = self._kept[key] = (latest.monotonic, self._draw(model_uid, seconds))
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return kept[1]

    def _draw(self, model_uid: str, seconds: float) -> Picture:
        self.drawn += 1
        latest = self._sampler.latest
        assert latest is not None
        points = self._sampler.history(model_uid)
        every = self._sampler.interval_seconds
        window = data.Window(latest.at, seconds, every, since=points[0].at)
        drawn = plots(points, window)
        model = next(m for m in latest.models if m.model_uid == model_uid)
        events = data.event_table(self._sampler.events, model_uid)
        advice = self._advise(model_uid)
        return Picture(
            figures=render.figures_html(data.figures(points[-1].numbers)),
            advice=render.advice_html([each.text for each in advice]),
            offers_pause=any(each.pause_stores for each in advice),
            drawings=tuple(render.plot_html(plot) for plot in drawn),
            tables=tuple(render.table_html(plot.table()) for plot in drawn),
            replicas=render.table_html(data.replica_table(model), "No replica reports."),
            events=render.table_html(events, "Nothing has happened yet."),
        )
