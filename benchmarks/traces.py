"""Request traces: read from a file, or made up.

A trace is a list of requests in order of arrival, each a list of prefix block ids: equal ids mean
equal blocks after equal prefixes.
"""

from __future__ import annotations

import gzip
import json
import random
from itertools import count
from pathlib import Path

Trace = list[list[int]]


def read_trace(path: Path) -> Trace:
    """Requests of a file with one JSON object a line: ``timestamp`` and ``hash_ids``. May be .gz.

    Raises:
        ValueError: a line is no such object.
    """
    requests = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = json.loads(line)
                requests.append((request["timestamp"], [int(i) for i in request["hash_ids"]]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: no request ({error!r}); give one JSON object a line "
                    "with timestamp and hash_ids"
                ) from error
    requests.sort(key=lambda request: request[0])
    return [blocks for _, blocks in requests]


def synthetic_trace(requests: int, seed: int) -> Trace:
    """Chats of several turns that begin with one of 20 shared prefixes, and scans read once.

    Of ten requests three are scans of 20 to 60 blocks; the others are turns of one of 200 chats at
    a time, which grow by 2 to 8 blocks a turn and end after a turn with a chance of one in six.
    """
    rng, ids = random.Random(seed), count()
    prefixes = [[next(ids) for _ in range(rng.randint(2, 16))] for _ in range(20)]
    popular = [1 / (rank + 1) for rank in range(len(prefixes))]

    def more(least: int, most: int) -> list[int]:
        return [next(ids) for _ in range(rng.randint(least, most))]

    def begin() -> list[int]:
        return list(rng.choices(prefixes, popular)[0])

    chats, trace = [begin() for _ in range(200)], []
    for _ in range(requests):
        if rng.random() < 0.3:
            trace.append(more(20, 60))
            continue
        chat = rng.randrange(len(chats))
        chats[chat] = chats[chat] + more(2, 8)
        trace.append(chats[chat])
        if rng.random() < 1 / 6:
            chats[chat] = begin()
    return trace
