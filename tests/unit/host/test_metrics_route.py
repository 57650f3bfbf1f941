"""The sampler and the metrics within Xinference's real application, from its start to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("xinference")

from aioprometheus import REGISTRY
from cache_views import model, replica, stats
from test_api import _collect_connections, client, make_api  # noqa: F401  (fixtures)
from test_sampler import Answers
from xinference.api import restful_api, routers

from xinference_xavier.host import api as our_api
from xinference_xavier.host import exporter as exporter_module
from xinference_xavier.host.exporter import Exporter, series_of
from xinference_xavier.host.sampler import Sample, Sampler
from xinference_xavier.metrics import METRICS, PREFIX

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


class CapturedServer:
    """Instead of listening: what the host would have served."""

    def __init__(self, config: Any) -> None:
        self.app = config.app

    def run(self) -> None: ...


Serve = Callable[[Answers], Any]


@pytest.fixture
def serve(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> Serve:  # noqa: F811
    """The host's application as it serves it, middleware and all; ``make_api`` gives it a home."""

    def made(answers: Answers) -> Any:
        monkeypatch.setattr(our_api, "ClusterView", lambda *_: answers)
        monkeypatch.setenv("XINFERENCE_AUTH_ADVANCED", "0")
        our_api.on_routers(routers)
        api = restful_api.RESTfulAPI("127.0.0.1:9", "127.0.0.1", 0)
        api.serve(server_factory=CapturedServer)
        return api

    return made


@asynccontextmanager
async def running(api: Any) -> AsyncIterator[Sampler]:
    async with api._app.router.lifespan_context(api._app):
        yield api._app.state.xavier_sampler


async def scraped(api: Any) -> dict[str, float]:
    """Our series of the host's page."""
    async with client(api) as http:
        answer = await http.get("/metrics")
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line.startswith(PREFIX)]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter(Sampler(Answers()))
    yield made
    made.stop()


def values(name: str) -> dict[tuple[tuple[str, str], ...], float]:
    found = REGISTRY.get(PREFIX + name).get_all()
    return {tuple(sorted(labels.items())): value for labels, value in found}


async def test_metrics_show_on_the_hosts_own_page_while_it_runs(serve: Serve) -> None:
    told = stats(tiers__gpu__snapshots=7, counters__tokens_peer=48, copies__load__seconds=1.5)
    answers = Answers(model(replica(0, stats=told), replica(1)))
    api = serve(answers)
    assert answers.asked == []
    async with running(api) as sampler:
        while sampler.latest is None:
            await asyncio.sleep(0.01)
        shown = await scraped(api)
        assert shown[f'{PREFIX}snapshots{{model="m",replica="0",tier="gpu"}}'] == 7
        tokens = f'{PREFIX}prompt_tokens_total{{model="m",replica="0",source="peer"}}'
        assert shown[tokens] == 48
        assert shown[f'{PREFIX}copy_seconds_total{{kind="load",model="m",replica="0"}}'] == 1.5
        assert shown[f'{PREFIX}replica_up{{model="m",replica="1"}}'] == 1
        assert shown[f"{PREFIX}sampler_polls_total"] == 1
        assert "xinference:workers_total" in {c.name for c in REGISTRY.get_all()}
        for _ in range(20):
            await scraped(api)
        assert len(answers.asked) == 1  # scraping asks nobody
        answers.answer = [model(replica(1))]
        await sampler.poll()
        assert not [series for series in await scraped(api) if 'replica="0"' in series]
        began = time.monotonic()
    assert time.monotonic() - began < 1
    asked = len(answers.asked)
    assert not await scraped(api)
    await asyncio.sleep(0.1)
    assert len(answers.asked) == asked


async def test_a_server_that_starts_again_shows_them_again(serve: Serve) -> None:
    for _ in range(2):
        api = serve(Answers(model(replica())))
        async with running(api) as sampler:
            while sampler.latest is None:
                await asyncio.sleep(0.01)
            assert f'{PREFIX}rows{{model="m",replica="0",tier="gpu"}}' in await scraped(api)


async def test_every_declared_metric_is_there(serve: Serve) -> None:
    told = stats(sharing__fetch_failures={"stale": 1}, sharing__fetches_skipped={"no_room": 1})
    api = serve(Answers(model(replica(stats=told))))
    async with running(api) as sampler, client(api) as http:
        while sampler.latest is None:
            await asyncio.sleep(0.01)
        text = (await http.get("/metrics")).text
    for metric in METRICS:
        assert f"# HELP {metric.name} {metric.help}\n" in text
        assert f"# TYPE {metric.name} {metric.kind.value}\n{metric.name}" in text, metric.name


async def test_metrics_that_cannot_be_shown_do_not_end_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(metric: Any) -> Any:
        raise TypeError("another aioprometheus")

    monkeypatch.setattr(exporter_module, "_collector", broken)
    api = serve(Answers(model(replica())))
    async with running(api) as sampler:
        while sampler.latest is None:
            await asyncio.sleep(0.01)
    assert "metrics xinference:xavier_* are not available" in caplog.text


def test_a_silent_replica_is_down_and_one_without_an_engine_has_no_rows(
    exporter: Exporter,
) -> None:
    silent = replica(0, stale=True)
    starting = replica(1, state="starting", stats=None)
    exporter.fill(_sample(model(silent, starting)))
    zero, one = (("model", "m"), ("replica", "0")), (("model", "m"), ("replica", "1"))
    assert values("replica_up") == {zero: 0, one: 0}
    assert set(values("peers")) == {zero}


def test_while_nobody_can_be_asked_numbers_stay_for_a_while(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.forget_the_old()  # before the first sample
    assert values("rows") == {}
    exporter._sampler.latest = _sample(model(replica()))
    exporter.fill(exporter._sampler.latest)
    exporter._sampler.polls, exporter._sampler.errors = 9, 4
    exporter.forget_the_old()
    assert set(values("replica_up").values()) == {0}
    assert len(values("rows")) == 2
    assert values("sampler_errors_total") == {(): 4}
    monkeypatch.setattr(exporter_module, "EXPIRE_SECONDS", 0.0)
    exporter.forget_the_old()
    assert values("rows") == {}
    assert values("sampler_errors_total") == {(): 4}


def test_reasons_become_labels(exporter: Exporter) -> None:
    told = stats(
        counters__failed_copies=3,
        sharing__fetch_failures={"timed_out": 2},
        skips={"no_evictable_row": 5},
    )
    exporter.fill(_sample(model(replica(stats=told))))
    faults = {dict(labels)["reason"]: n for labels, n in values("faults_total").items()}
    assert faults == {"copy": 3, "mismatch": 0, "fetch_timed_out": 2}
    skipped = {dict(labels)["reason"]: n for labels, n in values("skipped_blocks_total").items()}
    assert skipped == {"no_evictable_row": 5}


async def test_names_of_models_cannot_break_the_page(serve: Serve) -> None:
    api = serve(Answers(model(replica(), uid='a"b\\c\nd')))
    async with running(api) as sampler:
        while sampler.latest is None:
            await asyncio.sleep(0.01)
        shown = await scraped(api)
    assert f'{PREFIX}peers{{model="a\\"b\\\\c\\nd",replica="0"}}' in shown


def test_numbers_of_an_older_replica_may_be_missing() -> None:
    older = stats()
    del older["accounts"], older["reuse"]
    found = {m.name for m in METRICS if list(series_of(m, older))}
    assert PREFIX + "rows" in found
    assert PREFIX + "saved_seconds_total" not in found


def _sample(*models: Any) -> Sample:
    return Sample(time.time(), time.monotonic(), list(models))
