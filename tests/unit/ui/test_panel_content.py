"""What the panel says of a history: numbers, plots, sentences, tables, events, verdicts."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from xinference_xavier.ui import charts, data, render, units
from xinference_xavier.ui.series import MOST_ROWS, Plot, Series, plots
from xinference_xavier.ui.snapshot import PLOTS, Pictures

from xinference_xavier.host.advisor import Advice
from xinference_xavier.host.counters import Counts
from xinference_xavier.host.events import Event
from xinference_xavier.host.history import Point, Sample
from xinference_xavier.host.parity import Difference, PeerName, ShareView
from xinference_xavier.host.sampler import Sampler
from xinference_xavier.host.summary import ModelNumbers, ModelRates, TierNumbers
from xinference_xavier.host.view import ModelView, ReplicaView

RATES = ModelRates(
    seconds=10.0,
    demotions_per_minute=30.0,
    promotions_per_minute=0.0,
    evictions_per_minute=1.5,
    faults_per_minute=0.0,
    requests_per_second=1.0,
    hit_tokens_per_second={"gpu": 100.0, "cpu": 50.0, "peer": 25.0},
    computed_tokens_per_second=10.0,
    transfer_bytes_per_second={"store": 2.0**20, "load": 0.0, "move": 0.0, "fetch": 0.0},
    net_seconds_per_second=0.5,
)
NUMBERS = ModelNumbers(
    replicas=2,
    reporting=2,
    gpu=TierNumbers(rows=128, snapshots=96, bytes=6 * 2**20, budget_bytes=8 * 2**20),
    cpu=TierNumbers(rows=1024, snapshots=12, bytes=2**20, budget_bytes=64 * 2**20),
    tokens_prompt=10_000,
    hits_gpu_tokens=2000,
    hits_gpu_blocks=63,
    hits_cpu_blocks=5,
    hits_peer_blocks=7,
    misses_blocks=11,
    tokens_saved=2500,
    demotions=1234,
    evictions_gpu=2,
    evictions_cpu=3,
    shadowed_rows=9,
    leases=4,
    leased_rows=40,
    net_seconds=12.34,
    rates=RATES,
)


def figures(numbers: ModelNumbers) -> dict[str, data.Figure]:
    return {figure.label: figure for figure in data.figures(numbers)}


def test_the_first_row_has_every_number_with_its_unit() -> None:
    told = {label: (f.value, f.note) for label, f in figures(NUMBERS).items()}
    assert told == {
        "GPU snapshots": ("96 / 128", "75 % of the rows"),
        "GPU bytes": ("6 MiB", "of a budget of 8 MiB"),
        "CPU snapshots": ("12 / 1,024", "1 % of the rows"),
        "CPU bytes": ("1 MiB", "of a budget of 64 MiB"),
        "Demotions": ("30 / min", "1,234 in all"),
        "Evictions": ("1.50 / min", "5 in all"),
        "GPU hits": ("63", "blocks; 2,000 tokens"),
        "CPU hits": ("5", "blocks; 0 tokens"),
        "Peer hits": ("7", "blocks; 0 tokens"),
        "Misses": ("11", "blocks asked for in vain"),
        "Tokens saved": ("2,500", "25 % of the prompts' tokens"),
        "Net time": ("12.3 s", "saved, less copies, waits and failures"),
        "Shadowed rows": ("9", "the engine's own cache has them too"),
        "Leases": ("4", "on 40 rows"),
        "Quarantined rows": ("0", "a late read may still write to them"),
        "Faults": ("0", "none: no copy or read has failed"),
    }


def test_alarms_are_said_in_words() -> None:
    assert not [f for f in data.figures(NUMBERS) if f.alarm]
    bad = ModelNumbers(
        net_seconds=-200.0, quarantined_rows=3, faults=5, faults_by_reason={"copy": 2, "fetch_x": 3}
    )
    alarms = {label: f for label, f in figures(bad).items() if f.alarm}
    assert set(alarms) == {"Net time", "Quarantined rows", "Faults"}
    assert "does harm" in alarms["Net time"].note
    assert alarms["Faults"].note == "copy: 2, fetch x: 3"
    html = render.figures_html(data.figures(bad))
    assert html.count('class="x-alarm"') == html.count(">look<") == 3


def test_before_the_second_sample_there_are_no_rates() -> None:
    told = figures(ModelNumbers())
    assert told["Demotions"].value == "–"
    assert told["GPU snapshots"].note == "tier is off"
    assert told["Tokens saved"].note == "0 % of the prompts' tokens"


def history(levels: Sequence[int | None], apart: float = 2.0, end: float = 6000.0) -> list[Point]:
    """A sample every ``apart`` seconds up to ``end``; None where there was none."""
    made = []
    for number, level in enumerate(levels):
        if level is None:
            continue
        at = end - apart * (len(levels) - 1 - number)
        rates = ModelRates(**{**_fields(RATES), "demotions_per_minute": float(level)})
        tier = TierNumbers(rows=128, snapshots=level)
        numbers = ModelNumbers(gpu=tier, cpu=TierNumbers(rows=50), rates=rates)
        made.append(Point(at, at, numbers, Counts({}, [])))
    return made


def _fields(rates: ModelRates) -> dict[str, Any]:
    return {name: getattr(rates, name) for name in ModelRates.__slots__}


def drawn(points: Sequence[Point], seconds: float = 300.0) -> dict[str, Plot]:
    window = data.Window(6000.0, seconds, 2.0)
    return {plot.key: plot for plot in plots(points, window)}


def test_levels_show_the_last_of_each_part_and_rates_the_peak() -> None:
    levels: list[int | None] = [0] * 1799 + [0]
    levels[1000] = 99
    shown = drawn(history(levels), seconds=3600.0)
    [gpu, _] = shown["snapshots"].series
    [demotions, *_] = shown["moves"].series
    assert len(gpu.values) == 120
    assert gpu.peak == 0.0
    assert demotions.peak == 99.0
    assert "demotions 0 now and 99 at most" in shown["moves"].summary


def test_a_gap_in_the_samples_is_a_gap_in_the_line() -> None:
    levels: list[int | None] = [5] * 60 + [None] * 40 + [7] * 50
    [gpu, cpu] = drawn(history(levels))["snapshots"].series
    runs = list(charts.segments(gpu.values))
    assert len(runs) == 2
    assert {value for _, value in runs[0]} == {5}
    assert {value for _, value in runs[1]} == {7}
    assert cpu.last == 0


def test_sentences_say_what_the_plots_show() -> None:
    shown = drawn(history([10] * 75 + [96] * 75))
    assert shown["snapshots"].summary == (
        "In the last 5 minutes, GPU went from 10 to 96 of 128 and CPU stayed at 0 of 50 snapshots."
    )
    assert shown["hits"].summary == (
        "In the last 5 minutes, in tokens per second: GPU 100 now and 100 at most, CPU 50 now and "
        "50 at most, peer 25 now and 25 at most, computed 10 now and 10 at most."
    )
    assert "store 1 MiB/s now and 1 MiB/s at most; none for" in shown["transfers"].summary
    assert drawn([])["moves"].summary == "No samples of the last 5 minutes yet."


def test_every_plot_has_a_table_of_the_same_numbers() -> None:
    shown = drawn(history([None] * 50 + list(range(100))))
    assert len(shown) == PLOTS
    for plot in shown.values():
        table = plot.table()
        assert table.columns == ("time (UTC)", *(line.name for line in plot.series))
        assert 0 < len(table.rows) <= MOST_ROWS
    newest = shown["snapshots"].table().rows[0]
    assert newest == ("01:40:00", "99", "0")


def parsed(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(charts.chart(plot))


def test_a_drawing_is_sound_and_described() -> None:
    for plot in drawn(history(list(range(150)))).values():
        root = parsed(plot)
        title, desc = root[0], root[1]
        assert (title.tag, desc.tag) == ("title", "desc")
        assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
        assert desc.text == plot.summary
        numbers = re.findall(r"-?\d+\.\d", " ".join(p.get("d", "") for p in root.iter("path")))
        assert all(0 <= float(number) <= charts.WIDTH for number in numbers)


def test_lines_differ_in_more_than_colour() -> None:
    styles = (render.__file__).replace("render.py", "static/panel.css")
    with open(styles, encoding="utf-8") as file:
        css = file.read()
    dashes = [
        re.search(rf"\.x-s{n} \.x-line {{ stroke: [^;]+;( stroke-dasharray: [^;]+)?", css)
        for n in range(4)
    ]
    assert len({found.group(1) for found in dashes if found}) == 4
    assert len({mark.partition("transform")[0] for mark in charts._MARKERS}) == 4
    for plot in drawn(history([1, 2, 3])).values():
        legend = charts.legend(plot)
        assert all(line.name in legend for line in plot.series)
        assert len({line.style for line in plot.series}) == len(plot.series)


def test_values_lie_where_the_axis_says() -> None:
    series = [Series("a", 0, [0.0, 50.0, None, 100.0])]
    plot = Plot("k", "t", "things", [0.0, 1.0, 2.0, 3.0], series, units.count_text, "s")
    [line] = [p for p in parsed(plot).iter("path") if p.get("class") == "x-line"]
    bottom, top = charts.HEIGHT - charts.BOTTOM, charts.TOP
    points = re.findall(r"([\d.]+) ([\d.]+)", line.get("d", ""))
    heights = [float(y) for _, y in points]
    assert heights[:2] == [bottom, (bottom + top) / 2]
    assert heights[-1] == top
    ticks = [t.text for t in parsed(plot).iter("text") if t.get("text-anchor") == "end"]
    assert ticks[:5] == ["0", "25", "50", "75", "100"]


def replica(number: int, **fields: Any) -> ReplicaView:
    return ReplicaView(
        **{
            "replica": number,
            "state": "running",
            "address": "127.0.0.1:9",
            "pid": 1,
            "started": 0.0,
            "heartbeat_age_seconds": 0.1,
            "stale": False,
            "options": {},
            "share": None,
            "stats": None,
            **fields,
        }
    )


def share(**fields: Any) -> ShareView:
    given = {"scope": "s", "problem": None, "namespace": {}, "shares_with": [], "not_with": []}
    return ShareView(**{**given, **fields})


VERDICTS = [
    (None, "Not known while its engine starts."),
    (share(), "Shares with no replica: there is none in its namespace."),
    (share(shares_with=[PeerName(model_uid="m", replica=1)]), "Shares with m/1."),
    (share(scope=None, problem="NIXL is missing."), "Shares with nobody: NIXL is missing."),
    (
        share(
            shares_with=[PeerName(model_uid="m", replica=1)],
            not_with=[
                Difference(model_uid="n", replica=0, fields={"dtype": ("float32", None)}),
                Difference(model_uid="n", replica=1, fields={}, reason="It keeps to itself."),
            ],
        ),
        "Shares with m/1. Not with n/0: dtype is float32 here and missing there. "
        "Not with n/1: It keeps to itself.",
    ),
]


@pytest.mark.parametrize(("shared", "words"), VERDICTS)
def test_verdicts_name_who_shares_and_which_field_differs(
    shared: ShareView | None, words: str
) -> None:
    assert data.verdict(replica(0, share=shared)) == words


def test_the_replica_table_tells_a_silent_replica_from_a_starting_one() -> None:
    stats = {
        "tiers": {"gpu": {"snapshots": 3, "rows": 4}, "cpu": {"snapshots": 5, "rows": 1000}},
        "counters": {"tokens_gpu": 10, "tokens_cpu": 20, "tokens_peer": 3, "failed_copies": 1},
        "sharing": {"fetch_failures": {"late": 2}},
    }
    model = ModelView(
        model_uid="m",
        enabled=True,
        replicas=[replica(0, stale=True, stats=stats), replica(1, state="starting")],
    )
    rows = data.replica_table(model).rows
    assert rows[0][:6] == ("0", "running, does not answer", "3 / 4", "5 / 1,000", "33", "3")
    assert rows[1][:6] == ("1", "starting", "–", "–", "–", "–")


def test_events_of_the_model_and_of_none_are_listed_newest_first() -> None:
    events = [
        Event(0.0, "m", 0, "replica_up", "The replica is running."),
        Event(1.0, "other", 0, "fault", "Not ours."),
        Event(2.0, "", None, "not_answering", "Nobody answers."),
        Event(3.0, "m", 1, "demotion_burst", "30 of 64 rows."),
    ]
    table = data.event_table(events, "m")
    assert [row[2] for row in table.rows] == ["demotion burst", "no answer", "replica up"]
    assert table.rows[1][:2] == ("00:00:02", "–")
    many = [Event(float(n), "m", 0, "fault", str(n)) for n in range(500)]
    assert len(data.event_table(many, "m").rows) == data.MOST_EVENTS


def test_nothing_from_outside_reaches_the_page_as_html() -> None:
    evil = "<img src=x onerror=alert(1)>"
    table = data.Table(evil, (evil,), [(evil, evil)])
    plot = Plot("k", evil, evil, [0.0, 1.0], [Series(evil, 0, [1.0, None])], lambda v: evil, evil)
    figure = data.Figure(evil, evil, evil, alarm=True)
    pages = [render.table_html(table), render.plot_html(plot), render.figures_html([figure])]
    pages += [render.advice_html([evil]), render.said_html([evil]), render.status_html(evil)]
    pages += [render.table_html(data.Table("c", ("a",), []), evil)]
    for page in pages:
        assert "<img" not in page
        assert "&lt;img" in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.bytes_text(0), "0 B"),
        (units.bytes_text(1536), "1.5 KiB"),
        (units.bytes_text(4 * 2**30), "4 GiB"),
        (units.count_text(12345), "12,345"),
        (units.count_text(0.126), "0.13"),
        (units.count_text(45.67), "45.7"),
        (units.count_text(1234.5), "1,234"),
        (units.seconds_text(-5), "-5.0 s"),
        (units.seconds_text(600), "10.0 min"),
        (units.seconds_text(36_000), "10.0 h"),
        (units.window_text(300), "5 minutes"),
        (units.window_text(3600), "1 hour"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize("number", [0, 0.003, 1, 1.01, 3, 9.9, 10, 11, 441, 1e9 + 1])
def test_axes_end_above_the_peak_and_not_far(number: float) -> None:
    for end in (units.round_up(number), units.round_up_bytes(number)):
        assert end >= number
        assert number < 4 or end <= 2.5 * number


class Nobody:
    async def models(self) -> list[ModelView]:
        return []


def test_a_picture_is_drawn_once_per_sample_whoever_looks() -> None:
    sampler = Sampler(Nobody())
    pictures = Pictures(
        sampler, lambda uid: [Advice("harm", f"advice for {uid}", pause_stores=True)]
    )
    assert pictures.models() == []
    assert pictures.of("m", 300) is None
    assert "No numbers yet" in pictures.status()
    model = ModelView(model_uid="m", enabled=True, replicas=[replica(0, state="starting")])
    sampler._keep(Sample(time.time(), time.monotonic(), [model]))
    first = pictures.of("m", 300)
    assert first is not None
    assert all(pictures.of("m", 300) is first for _ in range(10))
    assert pictures.drawn == 1
    pictures.of("m", 900)
    assert pictures.drawn == 2
    sampler._keep(Sample(time.time(), time.monotonic() + 2, [model]))
    assert pictures.of("m", 300) is not first
    assert "advice for m" in first.advice
    assert len(first.drawings) == len(first.tables) == PLOTS


def test_old_numbers_are_said_to_be_old() -> None:
    sampler = Sampler(Nobody())
    sampler.latest = Sample(time.time() - 100, time.monotonic() - 100, [])
    assert "100 s old: nobody answers" in Pictures(sampler, lambda uid: []).status()


def test_a_short_past_fills_the_plot() -> None:
    window = data.Window(6000.0, 300.0, 2.0, since=5900.0)
    times = window.times()
    assert 5900.0 < times[0] < times[-1] == 6000.0
    assert data.Window(6000.0, 300.0, 2.0, since=5999.0).span == 60.0
    assert data.Window(6000.0, 300.0, 2.0, since=1000.0).span == 300.0
