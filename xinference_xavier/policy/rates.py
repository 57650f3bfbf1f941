"""When reading a peer's blocks beats computing them: measured rates and their break-even.

Covers: averages of prefill and fetch speed, the smallest prefix worth fetching, and how long a
fetch may take. Does not cover measuring: seconds are passed in. Fed from the scheduler thread
(steps) and the bridge's (fetches); single numbers, so no lock.
"""

from __future__ import annotations

#: Weight of the newest measurement.
WEIGHT = 0.2
#: Steps with fewer tokens are decoding: their time says nothing about prefill.
PREFILL_TOKENS = 64
#: A fetch before the first measurement: call, read, call.
FIRST_LATENCY_SECONDS = 0.02
#: Bounds of a fetch's deadline, and the deadline before prefill was measured.
SHORTEST_SECONDS, LONGEST_SECONDS, FIRST_SECONDS = 1.0, 30.0, 10.0


class Rates:
    """Moving averages of one replica."""

    def __init__(self) -> None:
        #: Seconds to compute one prompt token; None before the first prefill.
        self.token_seconds: float | None = None
        #: Seconds to read one token's bytes from a peer, and seconds of a fetch beside reading.
        self.read_token_seconds: float | None = None
        self.latency_seconds = FIRST_LATENCY_SECONDS

    def note_step(self, tokens: int, seconds: float) -> None:
        """A forward step computed ``tokens``."""
        if tokens >= PREFILL_TOKENS and seconds > 0:
            self.token_seconds = _blend(self.token_seconds, seconds / tokens)

    def note_fetch(self, tokens: int, read_seconds: float, seconds: float) -> None:
        """A fetch brought ``tokens`` in ``seconds``, of which reading took ``read_seconds``."""
        if tokens <= 0:
            return
        self.read_token_seconds = _blend(self.read_token_seconds, read_seconds / tokens)
        self.latency_seconds = _blend(self.latency_seconds, max(0.0, seconds - read_seconds))

    def break_even_tokens(self) -> int:
        """Fewest tokens for which ``latency + n * read < n * compute``; 0 before any prefill.

        A very large number when reading is the slower one whatever the length.
        """
        if self.token_seconds is None:
            return 0
        gain = self.token_seconds - (self.read_token_seconds or 0.0)
        return int(self.latency_seconds / gain) + 1 if gain > 0 else 2**31

    def deadline_seconds(self, tokens: int) -> float:
        """What computing ``tokens`` would take, within bounds."""
        if self.token_seconds is None:
            return FIRST_SECONDS
        return min(max(tokens * self.token_seconds, SHORTEST_SECONDS), LONGEST_SECONDS)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else average + WEIGHT * (value - average)
