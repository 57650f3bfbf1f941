"""The sampler: one question per interval, a bounded past, and errors that end nothing."""

from __future__ import annotations

import asyncio
import time

import pytest
from cache_views import model, replica, stats

from xinference_xavier.host import history as history_module
from xinference_xavier.host.sampler import Sampler
from xinference_xavier.host.view import ModelView


class Answers:
    """Stands for the cluster: what is in ``models`` is the answer, an error is raised."""

    def __init__(self, *models: ModelView) -> None:
        self.answer: list[ModelView] | Exception = list(models)
        self.asked: list[float] = []

    async def models(self) -> list[ModelView]:
        self.asked.append(time.monotonic())
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_the_number_of_viewers_does_not_change_the_number_of_questions() -> None:
    answers = Answers(model(replica()))
    sampler = Sampler(answers, interval_seconds=0.5)
    seen: list[list[float]] = [[] for _ in range(20)]
    for viewer in seen:
        sampler.add_listener(lambda sample, viewer=viewer: viewer.append(sample.at))
    sampler.start()
    sampler.start()
    deadline = time.monotonic() + 1.8
    while time.monotonic() < deadline:
        for _ in seen:
            sampler.history("m")
        await asyncio.sleep(0.01)
    sampler.stop()
    assert 3 <= len(answers.asked) <= 4
    assert all(len(viewer) == len(answers.asked) for viewer in seen)
    assert sampler.polls == len(answers.asked)
    assert len(sampler.history("m")) == len(answers.asked)
    gaps = [b - a for a, b in zip(answers.asked, answers.asked[1:], strict=False)]
    assert all(0.4 < gap < 0.9 for gap in gaps)


async def test_stopping_drops_a_question_under_way() -> None:
    asked = asyncio.Event()

    class Never:
        async def models(self) -> list[ModelView]:
            asked.set()
            await asyncio.sleep(3600)
            return []

    sampler = Sampler(Never())
    sampler.start()
    await asked.wait()
    task = sampler._task
    assert task is not None
    began = time.monotonic()
    sampler.stop()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 0.1
    sampler.stop()


async def test_errors_are_counted_and_told_once() -> None:
    answers = Answers(model(replica()))
    sampler = Sampler(answers)
    failed: list[bool] = []
    sampler.add_listener(lambda sample: None, lambda: failed.append(True))
    await sampler.poll()
    answers.answer = ConnectionError("refused")
    await sampler.poll()
    await sampler.poll()
    assert (sampler.polls, sampler.errors, len(failed)) == (3, 2, 2)
    assert [event.kind for event in sampler.events] == ["not_answering"]
    assert "ConnectionError: refused" in sampler.events[0].text
    assert sampler.latest is not None
    answers.answer = []
    await sampler.poll()
    kinds = [event.kind for event in sampler.events]
    assert kinds == ["not_answering", "answering", "replica_gone"]


async def test_a_listener_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sampler, told = Sampler(Answers(model(replica()))), []
    remove = sampler.add_listener(lambda sample: 1 / 0)
    sampler.add_listener(told.append)
    await sampler.poll()
    assert len(told) == 1
    assert "ZeroDivisionError" in caplog.text
    remove()
    remove()
    caplog.clear()
    await sampler.poll()
    assert (len(told), caplog.text) == (2, "")


async def test_the_past_is_bounded_in_count_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_POINTS", 5)
    answers = Answers(model(replica()), model(replica(), uid="gone"))
    sampler = Sampler(answers, keep_seconds=3600)
    for _ in range(9):
        await sampler.poll()
    assert len(sampler.history("m")) == 5
    sampler = Sampler(answers, keep_seconds=0.05)
    await sampler.poll()
    answers.answer = [model(replica())]
    await asyncio.sleep(0.06)
    await sampler.poll()
    assert len(sampler.history("m")) == 1
    assert sampler.history("gone") == ()
    assert sampler.history("never seen") == ()


async def test_points_carry_rates_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    answers = Answers(model(replica(stats=stats(counters__demotions=10))))
    sampler = Sampler(answers)
    await sampler.poll()
    assert sampler.history("m")[-1].numbers.rates is None
    for number in range(1, 11):
        clock[0] += 2.0
        answers.answer = [model(replica(stats=stats(counters__demotions=10 + 3 * number)))]
        await sampler.poll()
    rates = sampler.history("m")[-1].numbers.rates
    assert rates is not None
    assert rates.seconds == pytest.approx(10.0)
    assert rates.demotions_per_minute == pytest.approx(90.0)
