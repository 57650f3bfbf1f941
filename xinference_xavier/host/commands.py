"""``xinference-xavier stats|clear|resize|lookup|pause|resume``: a cache from the command line.

Covers: arguments, calls to Xinference's REST API, and exit codes: 1 when a replica could not, 2
when the call was refused or nobody answered. Does not cover what the calls do (``admin.py``) and
what is printed (``tables.py``). A process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any
from urllib import error, parse, request

from xinference_xavier.host import tables

ENDPOINT = "http://127.0.0.1:9997"
#: Where Xinference's own commands read the endpoint, too.
ENDPOINT_VARIABLE = "XINFERENCE_ENDPOINT"
KEY_VARIABLE = "XINFERENCE_API_KEY"
#: Longer than any replica may take.
CALL_SECONDS = 60.0

Json = dict[str, Any]


class CallError(Exception):
    """A call did not succeed; the message is a sentence."""


class Api:
    """Xinference's REST API at one endpoint."""

    def __init__(self, endpoint: str, api_key: str | None) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._api_key = api_key

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """The answer of ``/v1/xavier<path>``.

        Raises:
            CallError: nobody answered, or the call was refused.
        """
        headers = {"Content-Type": "application/json"}
        key = self._api_key or _stored_token(self._endpoint)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        url = f"{self._endpoint}/v1/xavier{path}"
        try:
            asked = request.Request(url, data, headers, method=method)
            with request.urlopen(asked, timeout=CALL_SECONDS) as answer:
                found: Json = json.load(answer)
        except error.HTTPError as refused:
            raise CallError(_refusal(refused)) from None
        except (OSError, ValueError) as fault:
            reason = getattr(fault, "reason", fault)
            raise CallError(
                f"{self._endpoint} does not answer as Xinference does ({reason}). Give its address "
                f"with --endpoint or {ENDPOINT_VARIABLE}."
            ) from None
        return found


def _refusal(refused: error.HTTPError) -> str:
    try:
        detail = json.load(refused)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = refused.reason
    if refused.code == 401:
        remedy = f"Give a key with --api-key or {KEY_VARIABLE}, or run `xinference login`."
        return f"A key is wanted ({detail}). {remedy}"
    if refused.code == 403:
        return (
            f"The key does not allow this ({detail}). Changing and looking up need a user with "
            "models:write and its token (`xinference login`): API keys only read."
        )
    if refused.code == 404 and detail == "Not Found":
        return "This Xinference has no such call: is xinference-xavier installed where it runs?"
    return str(detail)


def _stored_token(endpoint: str) -> str | None:
    """What `xinference login` keeps for an endpoint, or None."""
    home = os.environ.get("XINFERENCE_HOME") or os.path.expanduser("~/.xinference")
    if not os.path.isdir(os.path.join(home, "auth")):
        return None
    from xinference.constants import XINFERENCE_AUTH_DIR
    from xinference.deploy.cmdline import get_hash_endpoint

    try:
        with open(os.path.join(XINFERENCE_AUTH_DIR, get_hash_endpoint(endpoint))) as file:
            return file.read().strip() or None
    except OSError:
        return None


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's subcommands; each sets ``run``."""
    stats = _command(commands, "stats", "what a model's cache holds, or all of them", _stats)
    stats.add_argument("model_uid", nargs="?", help="all models without it")
    _for_model(_command(commands, "clear", "forget every snapshot of a model", _clear))
    resize = _command(commands, "resize", "change a model's budgets while it runs", _resize)
    _for_model(resize)
    for tier in ("gpu", "cpu"):
        resize.add_argument(f"--xavier-{tier}-budget", metavar="SIZE", help="such as 4GiB")
    lookup = _command(commands, "lookup", "how much of a prompt is cached, and where", _lookup)
    _for_model(lookup)
    lookup.add_argument("prompt", nargs="?", help="a text; from the standard input without it")
    lookup.add_argument("--messages", action="store_true", help="it is a chat's messages in JSON")
    lookup.add_argument("--cache-salt", help="that of the request, if it has one")
    _for_model(_command(commands, "pause", "store no new blocks", _pause))
    _for_model(_command(commands, "resume", "store new blocks again", _resume))


def _command(commands: Any, name: str, text: str, run: Callable[..., int]) -> Any:
    parser = commands.add_parser(name, help=text, description=text)
    endpoint = os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT
    parser.add_argument("--endpoint", "-e", default=endpoint, help=f"Xinference's, {ENDPOINT}")
    key = os.environ.get(KEY_VARIABLE)
    parser.add_argument("--api-key", "-ak", default=key, help=f"or {KEY_VARIABLE}")
    parser.add_argument("--json", action="store_true", help="print the API's answer instead")
    parser.set_defaults(run=lambda given: _guarded(run, given))
    return parser


def _for_model(parser: Any) -> None:
    parser.add_argument("model_uid")


def _guarded(run: Callable[[Api, Any], int], given: Any) -> int:
    try:
        return run(Api(given.endpoint, given.api_key), given)
    except CallError as fault:
        print(fault, file=sys.stderr)
        return 2


def _model(given: Any, path: str) -> str:
    return f"/{parse.quote(given.model_uid, safe='')}{path}"


def _finish(given: Any, answer: Json, show: Callable[[Json], str]) -> int:
    """Print an answer; 1 when a replica could not."""
    problems = [r["problem"] for r in answer.get("replicas", ()) if r.get("problem")]
    text = json.dumps(answer, indent=2) if given.json else show(answer)
    if text:
        print(text)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _stats(api: Api, given: Any) -> int:
    path = "" if given.model_uid is None else _model(given, "")
    return _finish(given, api.call("GET", path), tables.show_stats)


def _clear(api: Api, given: Any) -> int:
    return _finish(given, api.call("POST", _model(given, "/clear")), tables.show_cleared)


def _resize(api: Api, given: Any) -> int:
    sizes = {
        "xavier_gpu_budget": given.xavier_gpu_budget,
        "xavier_cpu_budget": given.xavier_cpu_budget,
    }
    body = {name: size for name, size in sizes.items() if size is not None}
    return _finish(given, api.call("PATCH", _model(given, "/budgets"), body), tables.show_resized)


def _lookup(api: Api, given: Any) -> int:
    text = sys.stdin.read() if given.prompt is None else given.prompt
    body: Json = {"prompt": text}
    if given.messages:
        try:
            body = {"messages": json.loads(text)}
        except ValueError as fault:
            raise CallError(f"The messages are no JSON ({fault}). Give a list of them.") from None
    if given.cache_salt is not None:
        body["cache_salt"] = given.cache_salt
    return _finish(given, api.call("POST", _model(given, "/lookup"), body), tables.show_found)


def _pause(api: Api, given: Any) -> int:
    return _set_stores(api, given, paused=True)


def _resume(api: Api, given: Any) -> int:
    return _set_stores(api, given, paused=False)


def _set_stores(api: Api, given: argparse.Namespace, paused: bool) -> int:
    answer = api.call("POST", _model(given, "/stores"), {"paused": paused})
    return _finish(given, answer, tables.show_paused)
