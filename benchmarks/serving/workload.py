"""What is sent: the parts of the workload as stages of requests, the same for every mode.

Covers: sizes and how they scale, prompts, arrival times. Does not cover sending (``client.py``).
Pure functions of their arguments: prompts are drawn from seeds made of part, round and number, so
that two prompts share what this module says they share, and nothing else. A byte is a token.

Xinference gives requests to its two replicas in turns, in the order in which they arrive. Parts
that ask at the one what the other has computed put *steering* requests of one token between the
others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

LETTERS = "abcdefgh ijklmnop"
#: Seconds between arrivals of the interleaved load.
ARRIVAL_SECONDS = 0.1
STEER_SECONDS = 0.05
#: Shorter prompts than a block would never be cached.
LEAST_TOKENS = 64
#: Concurrency of warm runs, and of prompts that are all unique.
WARM = (16, 32)
UNIQUE_CONCURRENCY = 8


@dataclass(frozen=True)
class Sizes:
    """Tokens and counts; tokens and output caps are what ``scaled`` scales."""

    prompt_tokens: int = 4400
    stream_prompt_tokens: int = 128
    incoming_cap: int = 64
    stream_cap: int = 1024
    convoy_tokens: int = 10_000
    requests: int = 32
    streams: int = 8
    rounds: int = 3
    prefixes: int = 8
    convoy: int = 50
    conversations: int = 8
    turns: int = 4

    @classmethod
    def scaled(cls, scale: float, **chosen: int) -> Sizes:
        """The published sizes times ``scale``, except for those ``chosen``.

        Raises ``ValueError`` for a scale that is not within (0, 1] and for a count below 1.
        """
        if not 0 < scale <= 1:
            raise ValueError(f"--scale {scale}: give a number above 0 and at most 1")
        for name, value in chosen.items():
            if value < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {value}: give a whole number of at least 1")
        full = cls()
        tokens = {
            "prompt_tokens": max(LEAST_TOKENS, round(full.prompt_tokens * scale)),
            "convoy_tokens": max(LEAST_TOKENS, round(full.convoy_tokens * scale)),
            "incoming_cap": max(8, round(full.incoming_cap * scale)),
            "stream_cap": max(64, round(full.stream_cap * scale)),
        }
        return cls(**{**tokens, **chosen})

    @property
    def turn_tokens(self) -> int:
        """What one turn of a conversation adds, but for its answer."""
        return max(LEAST_TOKENS, self.prompt_tokens // (2 * self.turns))

    @property
    def max_model_tokens(self) -> int:
        """The longest request, answer included."""
        chat = self.turns * (self.turn_tokens + self.incoming_cap)
        longest = (
            self.prompt_tokens + self.incoming_cap,
            self.convoy_tokens + self.incoming_cap + LEAST_TOKENS,
            self.stream_prompt_tokens + self.stream_cap,
            chat,
        )
        return (max(longest) // 32 + 2) * 32


@dataclass(frozen=True)
class Request:
    """One completion, or a conversation when ``turns`` follow.

    ``at``: seconds after its stage began. ``turns``: each is sent as what was said so far, the
    answer and itself.
    """

    name: str
    group: str
    prompt: str
    max_tokens: int
    at: float = 0.0
    turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Requests that are sent together.

    ``concurrency`` at most are under way at a time; with None each is sent when its time ``at`` has
    come. Of a ``background`` stage only the first tokens are waited for before the next begins.
    """

    requests: tuple[Request, ...]
    concurrency: int | None = None
    background: bool = False

    def plan(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def text(seed: str, tokens: int) -> str:
    """Random words that differ from those of other seeds from the first token on."""
    return "".join(random.Random(seed).choices(LETTERS, k=tokens))


def interleaved(sizes: Sizes, number: int) -> list[Stage]:
    """Ongoing streams, then unique prompts that arrive one after the other."""
    return [_streams(sizes, "interleaved", number), Stage(_arrivals(sizes, number))]


def warm(sizes: Sizes, number: int) -> list[Stage]:
    """Prompts computed once, then asked again in other orders at two concurrencies."""
    prompts = [text(f"warm-{number}-{i}", sizes.prompt_tokens) for i in range(sizes.requests)]
    stages = [_closed("prepare", prompts, sizes.incoming_cap, WARM[0])]
    for concurrency in WARM:
        shuffled = random.Random(concurrency).sample(prompts, len(prompts))
        stages.append(_closed(f"warm{concurrency}", shuffled, sizes.incoming_cap, concurrency))
    return stages


def unique(sizes: Sizes, number: int) -> list[Stage]:
    """Nothing to reuse: what the cache costs."""
    prompts = [text(f"unique-{number}-{i}", sizes.prompt_tokens) for i in range(sizes.requests)]
    return [_closed("incoming", prompts, sizes.incoming_cap, UNIQUE_CONCURRENCY)]


def shared(sizes: Sizes, number: int) -> list[Stage]:
    """The interleaved load with prefixes that one replica has computed, asked of the other.

    Three quarters of a prompt are its prefix's. A number of streams that is not even would change
    whose turn it is: one more steering request follows then.
    """
    length = sizes.prompt_tokens * 3 // 4
    prefixes = [text(f"shared-{number}-{i}", length) for i in range(sizes.prefixes)]
    prepared = []
    for i, prefix in enumerate(prefixes):
        prepared += [Request(f"prefix{i}", "prepare", prefix, 1), _steer(f"prepared{i}")]
    streams = _streams(sizes, "shared", number)
    even = [_steer("even")] if sizes.streams % 2 else []
    incoming = []
    for i in range(sizes.requests):
        tail = text(f"shared-tail-{number}-{i}", sizes.prompt_tokens - length)
        at = STEER_SECONDS + i * ARRIVAL_SECONDS
        prompt = prefixes[i % sizes.prefixes] + tail
        incoming.append(_steer(f"turn{i}", at - STEER_SECONDS))
        incoming.append(Request(f"incoming{i}", "incoming", prompt, sizes.incoming_cap, at))
    return [
        Stage(tuple(prepared), concurrency=1),
        streams,
        Stage(tuple(even), concurrency=1),
        Stage(tuple(incoming)),
    ]


def convoy(sizes: Sizes, number: int) -> list[Stage]:
    """Many requests at once for one long prefix that one of the replicas has computed."""
    prefix = text(f"convoy-{number}", sizes.convoy_tokens)
    requests = tuple(
        Request(f"convoy{i}", "incoming", prefix + text(f"convoy-tail-{number}-{i}", 32), 8)
        for i in range(sizes.convoy)
    )
    return [Stage((Request("prefix", "prepare", prefix, 1), _steer("other")), 1), Stage(requests)]


def chat(sizes: Sizes, number: int) -> list[Stage]:
    """Conversations whose every turn repeats what was said before."""
    talks = []
    for i in range(sizes.conversations):
        first, *rest = (
            text(f"chat-{number}-{i}-{turn}", sizes.turn_tokens) for turn in range(sizes.turns)
        )
        talks.append(Request(f"chat{i}", "incoming", first, sizes.incoming_cap, turns=tuple(rest)))
    return [Stage(tuple(talks), concurrency=4)]


def tiers(sizes: Sizes, number: int) -> list[Stage]:
    """Six prompts for each replica one by one, then again: first those that came last but one.

    For an engine whose own pool holds one prompt: it must find some in each tier.
    """
    prompts = [text(f"tiers-{number}-{i}", sizes.prompt_tokens) for i in range(12)]
    # Pairs stay pairs, so that each replica is asked again what it has computed itself.
    again = [prompts[i + j] for i in (8, 6, 4, 2, 0, 10) for j in (0, 1)]
    return [
        _closed("prepare", prompts, sizes.incoming_cap, 1),
        _closed("incoming", again, sizes.incoming_cap, 1),
    ]


PARTS: dict[str, Callable[[Sizes, int], list[Stage]]] = {
    "interleaved": interleaved,
    "unique": unique,
    "shared": shared,
    "convoy": convoy,
    "warm": warm,
    "chat": chat,
    "tiers": tiers,
}


def rounds(part: str, sizes: Sizes) -> Iterator[list[Stage]]:
    """The part's rounds; none of them shares a prompt with another."""
    for number in range(sizes.rounds):
        yield PARTS[part](sizes, number)


def _streams(sizes: Sizes, part: str, number: int) -> Stage:
    return Stage(
        tuple(
            Request(
                f"stream{i}",
                "stream",
                text(f"{part}-stream-{number}-{i}", sizes.stream_prompt_tokens),
                sizes.stream_cap,
            )
            for i in range(sizes.streams)
        ),
        background=True,
    )


def _arrivals(sizes: Sizes, number: int) -> tuple[Request, ...]:
    return tuple(
        Request(
            f"incoming{i}",
            "incoming",
            text(f"interleaved-{number}-{i}", sizes.prompt_tokens),
            sizes.incoming_cap,
            i * ARRIVAL_SECONDS,
        )
        for i in range(sizes.requests)
    )


def _closed(group: str, prompts: Sequence[str], cap: int, concurrency: int) -> Stage:
    requests = tuple(Request(f"{group}{i}", group, prompt, cap) for i, prompt in enumerate(prompts))
    return Stage(requests, concurrency)


def _steer(name: str, at: float = 0.0) -> Request:
    """Takes a replica's turn, and hardly any of its time."""
    return Request(name, "steer", "a", 1, at)
