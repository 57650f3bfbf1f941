"""The declared metrics on the host's ``/metrics``.

Covers: collectors in the registry that Xinference renders, filled from each sample. Does not cover
which metrics there are (``metrics.py``). Runs on the event loop of Xinference's API process, which
renders there too: a scrape never sees half a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from aioprometheus import REGISTRY, Counter, Gauge
from aioprometheus.metricdict import MetricDict

from xinference_xavier.actors.registry import EXPIRE_SECONDS
from xinference_xavier.host.sampler import Sample, Sampler
from xinference_xavier.host.view import ReplicaView
from xinference_xavier.metrics import METRICS, Kind, Metric

#: A label's values and the number.
Series = tuple[dict[str, str], float]


class Exporter:
    """Fills the collectors whenever ``sampler`` has asked.

    Each sample replaces every series, so that replicas that are gone leave none. When nobody can
    be asked, the last numbers stay for as long as a silent replica counts as alive.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._collectors = {metric: _collector(metric) for metric in METRICS}
        self._remove: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to follow the sampler."""
        self._remove = self._sampler.add_listener(self.fill, self.forget_the_old)

    def stop(self) -> None:
        """Follow it no more, and leave no series behind."""
        self._remove()
        for collector in self._collectors.values():
            collector.values = MetricDict()

    def fill(self, sample: Sample) -> None:
        """Show ``sample``."""
        self._show([(m.model_uid, r) for m in sample.models for r in m.replicas])

    def forget_the_old(self) -> None:
        """Nobody could be asked."""
        latest = self._sampler.latest
        if latest is not None and time.monotonic() - latest.monotonic < EXPIRE_SECONDS:
            self._show([(m.model_uid, r) for m in latest.models for r in m.replicas], up=False)
        else:
            self._show([])

    def _show(self, replicas: Iterable[tuple[str, ReplicaView]], up: bool = True) -> None:
        documents = [(_labels(uid, r), _document(r, up)) for uid, r in replicas]
        own = {"sampler": {"polls": self._sampler.polls, "errors": self._sampler.errors}}
        for metric, collector in self._collectors.items():
            values = MetricDict()
            for labels, document in documents if metric.labels else [({}, own)]:
                for more, number in series_of(metric, document):
                    values[{**labels, **more}] = number
            collector.values = values


def series_of(metric: Metric, document: Mapping[str, Any]) -> Iterator[Series]:
    """The metric's numbers in a replica's document, with its own label."""
    label = metric.own_label
    for value, path in metric.series:
        for name, number in _find(document, path.split(".")):
            yield ({} if label is None else {label: value.replace("*", _escaped(name))}), number


def _find(node: Any, path: list[str], name: str = "") -> Iterator[tuple[str, float]]:
    """Numbers at ``path``, each with the name that stood for ``*``."""
    if not path:
        if isinstance(node, (int, float)):
            yield name, node
    elif isinstance(node, Mapping):
        wild = path[0] == "*"
        for found in list(node) if wild else path[:1]:
            if found in node:
                yield from _find(node[found], path[1:], str(found) if wild else name)


def _document(replica: ReplicaView, up: bool) -> dict[str, Any]:
    return {
        **(replica.stats or {}),
        "replica": {
            "up": int(up and replica.state == "running" and not replica.stale),
            "started": replica.started,
            "heartbeat_age_seconds": replica.heartbeat_age_seconds,
        },
    }


def _labels(model_uid: str, replica: ReplicaView) -> dict[str, str]:
    return {"model": _escaped(model_uid), "replica": str(replica.replica)}


def _escaped(value: str) -> str:
    """A label's value as the text format wants it; ``aioprometheus`` leaves that to us."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _collector(metric: Metric) -> Any:
    """The collector of this name in the host's registry, made now if there is none."""
    known = {collector.name: collector for collector in REGISTRY.get_all()}
    if metric.name in known:
        return known[metric.name]
    made = Counter if metric.kind is Kind.COUNTER else Gauge
    return made(metric.name, metric.help)
