"""Why an engine did not start, carried from its processes to the one that launched it.

vLLM tells its parent only that the engine failed. Covers: one temporary file, written by the rank
that fails and read by the model process. Does not cover: failures that are not ours, which leave
the file empty. Both ends are on one machine; on any other the file does not exist, and nothing
is said.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


class LastWords:
    """The reader's end, in the model process: one file until ``close``."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="xinference-xavier-")
        os.close(handle)
        self.path = Path(name)

    def read(self) -> str:
        """The first failing rank's sentence; empty when none of ours failed."""
        with contextlib.suppress(OSError):
            return next(iter(self.path.read_text().splitlines()), "")
        return ""

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def last_words(path: str | None) -> Iterator[None]:
    """The writer's end, in a rank: an error of the body is written to ``path`` and raised on."""
    try:
        yield
    except Exception as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        if path is not None:
            with contextlib.suppress(OSError), open(path, "r+") as file:
                file.seek(0, os.SEEK_END)
                file.write(sentence + "\n")
        raise
