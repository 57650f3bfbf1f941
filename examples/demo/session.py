"""Which prompt goes next, so that the replica whose turn it is shows something.

Covers: sending prompts one after the other, who answered, and who has seen what. Does not cover:
measuring (``client.py``) and printing (``report.py``). Used by the demonstration's only thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from examples.demo.client import Client
from examples.demo.report import Record, Report


class Session:
    """Prompts sent to the replicas of one model, which take turns."""

    def __init__(
        self, client: Client, report: Report, prompts: Sequence[str], expected: Sequence[str]
    ) -> None:
        self._client = client
        self._report = report
        self._prompts = prompts
        self._expected = expected
        self.state = client.read_cache()
        #: By replica: the prompts it was asked, the latest last.
        self._asked: list[deque[int]] = [deque() for _ in self.state.requests]
        self._last = 0
        self._from_oldest = [False] * len(self._asked)

    def ask(self, number: int, phase: str) -> None:
        """Send one prompt; its line appears when the cache has counted it."""
        with self._report.console.status(f"prompt {number + 1}, {phase} pass"):
            answer = self._client.complete(self._prompts[number])
            earlier = self.state
            counted = earlier.counters.requests + (answer.error is None)
            self.state = self._client.read_cache_after(counted)
        replica = self.state.answered_by(earlier)
        if replica is not None:
            self._last = replica
            if number in self._asked[replica]:
                self._asked[replica].remove(number)
            self._asked[replica].append(number)
        spent = self.state.counters - earlier.counters
        expected = self._expected[number]
        self._report.add(Record(number + 1, phase, answer, expected, spent, replica))

    def choose(self, of_others: bool) -> int:
        """A prompt for the replica whose turn is next.

        ``of_others``: one that only the other replica was asked. Else one of its own, in turns the
        one asked longest ago, which was demoted, and the last but one: the engine itself still has
        the last.
        """
        turn = (self._last + 1) % len(self._asked)
        own = self._asked[turn]
        if of_others:
            return next(n for n in range(len(self._prompts)) if n not in own)
        self._from_oldest[turn] = not self._from_oldest[turn]
        return own[0] if self._from_oldest[turn] else own[-2]
