"""The header that says where a response's prompt tokens came from.

Covers: completions and chat completions that are not streamed, whose body has the receipt
(``host/engine/usage.py``). Does not cover: streams, whose headers leave before the request's fate
is known. Runs in Xinference's API process; responses without a receipt stay as they are.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

HEADER = "x-xavier-prompt-tokens"

PATHS = ("/v1/completions", "/v1/chat/completions")

#: No text can look like these: a quote inside a JSON string has a backslash before it.
_DETAILS = b'"prompt_tokens_details":'
_RECEIPT = re.compile(rb'"xavier":\s*(\{[^{}]*\})')

_faults = itertools.count(1)

Endpoint = Callable[..., Awaitable[Any]]


def add_receipt_headers(router: Any) -> None:
    """Wrap the endpoints of ``PATHS``, before the host includes ``router``."""
    for route in router.routes:
        if getattr(route, "path", None) in PATHS and "POST" in (route.methods or ()):
            route.endpoint = _with_header(route.endpoint)


def _with_header(endpoint: Endpoint) -> Endpoint:
    @functools.wraps(endpoint)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        response = await endpoint(*args, **kwargs)
        try:
            receipt = receipt_in(getattr(response, "body", b""))
            if receipt is not None:
                response.headers[HEADER] = receipt
        except Exception:  # of ours alone: the response goes without its header
            if next(_faults).bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... of a burst
                logger.warning("A response goes without %s", HEADER, exc_info=True)
        return response

    return answer


def receipt_in(body: bytes) -> str | None:
    """The header's value, such as ``engine=0, gpu=96, cpu=0, peer=0, computed=4``, from a body.

    None without a receipt. Looks for its place instead of reading all of the body, which may
    hold megabytes of log probabilities.
    """
    start = body.rfind(_DETAILS)
    found = None if start < 0 else _RECEIPT.search(body, start)
    if found is None:
        return None
    tokens = json.loads(found.group(1))
    return ", ".join(f"{source}={int(count)}" for source, count in tokens.items())
