"""Our commands against a server of a few canned answers: what is asked, printed, and returned."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xinference_xavier.host.doctor import main

TIER = {
    "budget_bytes": 4 * 2**20,
    "rows": 64,
    "rows_leaving": 2,
    "state": "draining",
    "note": "1MiB beyond the budget stay allocated until the replica ends.",
}
FOUND = {"engine": 0, "gpu": 32, "cpu": 64, "peer": 0, "not_cached": 4, "prefix": 96}
STATS = {
    "tiers": {
        "gpu": {"snapshots": 3, "rows": 4, "bytes": 2**20, "budget_bytes": 2**22, "leaving": 5},
        "cpu": {"snapshots": 0, "rows": 8, "bytes": 0, "budget_bytes": 2**23, "leaving": 0},
    },
    "counters": {
        **{f"tokens_{name}": 7 for name in ("prompt", "engine", "gpu", "cpu", "peer", "computed")},
        "hits_gpu_blocks": 11,
        "hits_cpu_blocks": 12,
    },
    "stores_paused": True,
}
REPLICA = {"replica": 0, "state": "running", "stale": False, "stats": STATS}


def answered(**fields: Any) -> dict[str, Any]:
    return {"model_uid": "m", "replicas": [{"replica": 0, "problem": None, **fields}]}


ANSWERS: dict[tuple[str, str], tuple[int, Any]] = {
    ("GET", "/v1/xavier"): (200, {"models": [{"model_uid": "m", "replicas": [REPLICA]}]}),
    ("GET", "/v1/xavier/m"): (200, {"model_uid": "m", "replicas": [REPLICA]}),
    ("GET", "/v1/xavier/plain"): (200, {"model_uid": "plain", "detail": "No.", "replicas": []}),
    ("POST", "/v1/xavier/m/clear"): (200, answered(removed_now=5, removed_later=1)),
    ("PATCH", "/v1/xavier/m/budgets"): (200, answered(gpu=TIER, cpu={**TIER, "note": None})),
    ("POST", "/v1/xavier/m/lookup"): (200, {"tokens": 100, **answered(**FOUND)}),
    ("POST", "/v1/xavier/m/stores"): (200, answered(paused=True)),
    ("POST", "/v1/xavier/half/clear"): (
        200,
        {
            "model_uid": "half",
            "replicas": [
                {"replica": 0, "problem": None, "removed_now": 1, "removed_later": 0},
                {"replica": 1, "problem": "Replica 1 is still starting. Try again."},
            ],
        },
    ),
    ("POST", "/v1/xavier/x/clear"): (404, {"detail": "There is no model 'x'."}),
    ("POST", "/v1/xavier/secret/clear"): (401, {"detail": "Not authenticated"}),
    ("POST", "/v1/xavier/mine/clear"): (403, {"detail": "Not enough permissions"}),
}

COMMANDS = ("stats", "clear", "resize", "lookup", "pause", "resume")
#: What a shell may pass.
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12) | (
    st.sampled_from(
        ["m", "half", "--xavier-gpu-budget", "--cache-salt", "--messages", "[", "[]", "--"]
    )
)


class Server:
    """What was asked, in order: method, path, body and credential."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, str | None]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                server.asked.append(
                    (self.command, self.path, body, self.headers.get("Authorization"))
                )
                code, answer = ANSWERS.get(
                    (self.command, self.path), (404, {"detail": "Not Found"})
                )
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Server]:
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))
    monkeypatch.delenv("XINFERENCE_API_KEY", raising=False)
    made = Server()
    monkeypatch.setenv("XINFERENCE_ENDPOINT", made.url)
    yield made
    made.http.shutdown()
    made.http.server_close()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "asked", "words"),
    [
        (["stats"], ("GET", "/v1/xavier", None), ["m", "4MiB", "5 rows leaving", "7 prompt"]),
        (["stats", "m"], ("GET", "/v1/xavier/m", None), ["GPU", "CPU", "stores paused", "11"]),
        (["stats", "plain"], ("GET", "/v1/xavier/plain", None), ["plain: No."]),
        (["clear", "m"], ("POST", "/v1/xavier/m/clear", None), ["removed when released", "5"]),
        (
            ["resize", "m", "--xavier-gpu-budget", "4MiB"],
            ("PATCH", "/v1/xavier/m/budgets", {"xavier_gpu_budget": "4MiB"}),
            ["draining", "4MiB", "stay allocated"],
        ),
        (
            ["lookup", "m", "a text", "--cache-salt", "s"],
            ("POST", "/v1/xavier/m/lookup", {"prompt": "a text", "cache_salt": "s"}),
            ["100 tokens", "not cached", "96"],
        ),
        (
            ["lookup", "m", '[{"role": "user", "content": "a"}]', "--messages"],
            (
                "POST",
                "/v1/xavier/m/lookup",
                {"messages": [{"role": "user", "content": "a"}]},
            ),
            ["100 tokens"],
        ),
        (["pause", "m"], ("POST", "/v1/xavier/m/stores", {"paused": True}), ["paused"]),
        (["resume", "m"], ("POST", "/v1/xavier/m/stores", {"paused": False}), ["stores"]),
    ],
)
def test_commands_ask_and_print(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    asked: tuple[str, str, Any],
    words: list[str],
) -> None:
    assert run(*arguments) == 0
    assert server.asked == [(*asked, None)]
    shown = capsys.readouterr().out
    assert all(word in shown for word in words), shown
    assert run(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out) == ANSWERS[asked[:2]][1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["clear", "half"], 1, "Replica 1 is still starting. Try again."),
        (["clear", "x"], 2, "There is no model 'x'."),
        (["clear", "secret"], 2, "Give a key with --api-key or XINFERENCE_API_KEY"),
        (["clear", "mine"], 2, "models:write"),
        (["clear", "elsewhere"], 2, "is xinference-xavier installed where it runs?"),
        (["lookup", "m", "[broken", "--messages"], 2, "The messages are no JSON"),
        (["clear", "m", "--endpoint", "http://127.0.0.1:9"], 2, "http://127.0.0.1:9 does not"),
        (["clear", "m", "--endpoint", "nonsense"], 2, "nonsense does not answer"),
    ],
)
def test_errors_are_one_sentence_and_a_code(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert run(*arguments) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(COMMANDS), st.lists(WORDS, max_size=3))
def test_any_words_end_with_a_code(
    server: Server, monkeypatch: pytest.MonkeyPatch, command: str, words: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a prompt"))
    assert run(command, *words) in (0, 1, 2)


def test_the_key_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run("clear", "m", "--api-key", "k1")
    monkeypatch.setenv("XINFERENCE_API_KEY", "k2")
    run("clear", "m")
    assert [credential for *_, credential in server.asked] == ["Bearer k1", "Bearer k2"]


def test_a_prompt_comes_from_the_standard_input(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("long text"))
    run("lookup", "m")
    assert server.asked[0][2] == {"prompt": "long text"}
