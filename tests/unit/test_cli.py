"""``xinference launch`` with our options: the real command against a small HTTP server."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xinference.deploy import cmdline

from xinference_xavier.config import OPTIONS, XavierOptions
from xinference_xavier.host.cli import on_cmdline

#: What a shell may pass, numbers beyond any float among it.
VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12) | (
    st.sampled_from(
        ["4GiB", "auto", "-1", "1e400", "9" * 400, "9" * 5000, "[", "{}", "None", "nan"]
    )
)


class Server(ThreadingHTTPServer):
    """Answers like Xinference's API and keeps the launches it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.launches: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.answer: tuple[int, dict[str, Any]] = (200, {"model_uid": "m"})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if self.path.startswith("/v1/cluster/auth"):
            self._reply(200, {"auth": False})
        else:
            self._reply(200, [{"status": "READY", "replica_statuses": []}])

    def do_POST(self) -> None:
        self.server.requests.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.launches.append(json.loads(body))
        self._reply(*self.server.answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module", autouse=True)
def _options_on_the_command() -> None:
    on_cmdline(cmdline)  # the start-up hook has done it already; a second time changes nothing


def launch(server: Server, *arguments: str) -> Result:
    base = ["launch", "-e", server.endpoint, "--model-name", "qwen", "--model-engine", "vllm"]
    return CliRunner().invoke(cmdline.cli, [*base, *arguments])


def test_help_lists_each_option_with_its_meaning() -> None:
    text = " ".join(CliRunner().invoke(cmdline.cli, ["launch", "--help"]).output.split())
    for name in OPTIONS:
        assert f"--{name.replace('_', '-')}" in text
        assert XavierOptions.model_fields[name].description in text  # type: ignore[operator]
    assert "[default: 256MiB]" in text


def test_only_launch_has_the_options_and_only_once() -> None:
    for name, command in cmdline.cli.commands.items():
        ours = [p.name for p in command.params if p.name in OPTIONS]
        assert ours == (list(OPTIONS) if name == "launch" else [])


def test_the_request_carries_our_values(server: Server) -> None:
    done = launch(
        server,
        "--max_model_len",
        "8192",
        "--enable-xavier-gpu",
        "--xavier-gpu-budget",
        "1GiB",
        "--block_size",
        "32",
        "--xavier_store_decode",
        "false",
        "--xavier-self-check",
        "0.5",
    )
    assert done.exit_code == 0, done.output
    [payload] = server.launches
    assert payload["enable_xavier_gpu"] is True
    assert payload["xavier_gpu_budget"] == "1GiB"
    assert payload["xavier_store_decode"] is False
    assert payload["xavier_self_check"] == 0.5
    assert payload["max_model_len"] == 8192
    assert payload["block_size"] == 32
    assert "xavier_cpu_budget" not in payload


@pytest.mark.parametrize(
    "switch",
    [["--enable-xavier-gpu", "true"], ["--enable_xavier_gpu", "true"], ["--enable_xavier_gpu"]],
)
def test_spellings_of_the_switch(server: Server, switch: list[str]) -> None:
    assert launch(server, *switch).exit_code == 0
    assert server.launches[0]["enable_xavier_gpu"] is True


def test_without_our_flags_the_request_is_the_hosts_own(server: Server) -> None:
    arguments = ["--replica", "2", "--max_model_len", "8", "--n-gpu", "None", "--trust", "None"]
    assert launch(server, *arguments).exit_code == 0
    command = cmdline.cli.commands["launch"]
    wrapped, params = command.callback, command.params
    try:
        command.callback = wrapped.__wrapped__  # type: ignore[union-attr]
        command.params = [p for p in params if p.name not in OPTIONS]
        assert launch(server, *arguments).exit_code == 0
    finally:
        command.callback, command.params = wrapped, params
    with_plugin, without = server.launches
    assert with_plugin == without


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--enable-xavier-gpu", "--xavier-gpu-budget", "4XB"], "xavier_gpu_budget='4XB'"),
        (["--enable-xavier-gpu", "--xavier-gpu-bugdet", "4GiB"], "Did you mean xavier_gpu_budget?"),
        (["--xavier-gpu-bugdet", "4GiB"], "Did you mean xavier_gpu_budget?"),
        (["--xavier-cpu-budget", "4GiB"], "does nothing without enable_xavier_gpu"),
        (["--enable-xavier-gpu", "--enable_xavier", "true"], "enable_xavier=True"),
        (["--enable-xavier-gpu", "--model-engine", "sglang"], "model_engine='sglang'"),
        (["--enable-xavier-gpu", "--model-type", "rerank"], "model_type='rerank'"),
        (["--enable-xavier-gpu", "--env", "PYTHONHASHSEED", "1"], "envs.PYTHONHASHSEED='1'"),
        (["--enable-xavier-gpu", "perhaps"], "enable_xavier_gpu='perhaps' is not a boolean"),
    ],
)
def test_bad_input_ends_with_status_2_before_any_request(
    server: Server, arguments: list[str], sentence: str
) -> None:
    done = launch(server, *arguments)
    assert done.exit_code == 2
    assert sentence in done.output
    assert "Traceback" not in done.output
    assert server.requests == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(OPTIONS[1:]), VALUES, min_size=1))
def test_any_values_are_taken_or_end_with_status_2(server: Server, given: dict[str, str]) -> None:
    pairs = [(f"--{name}", value) for name, value in given.items()]
    done = launch(server, "--enable-xavier-gpu", *itertools.chain(*pairs))
    assert done.exit_code in (0, 2), done.exception
    assert done.exception is None or isinstance(done.exception, SystemExit)
    if done.exit_code:
        assert "Error: " in done.output


def test_a_refusal_by_the_server_is_shown_as_a_usage_error(server: Server) -> None:
    sentence = "xavier_gpu_budget=1 is below one row. Give at least 4096."
    server.answer = (400, {"detail": sentence})
    done = launch(server, "--enable-xavier-gpu", "--xavier-gpu-budget", "1")
    assert done.exit_code == 2
    assert f"Error: {sentence}\n" in done.output


@pytest.mark.parametrize(
    ("status", "arguments"), [(503, ["--enable-xavier-gpu"]), (400, []), (503, [])]
)
def test_other_failures_stay_the_hosts(server: Server, status: int, arguments: list[str]) -> None:
    server.answer = (status, {"detail": "no room"})
    done = launch(server, *arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, RuntimeError)
    assert str(done.exception) == "Failed to launch model, detail: no room"


def test_warnings_go_to_stderr(server: Server) -> None:
    done = launch(server, "--enable-xavier-gpu", "--xavier-cpu-budget", "0")
    assert done.exit_code == 0
    assert "Warning: xavier_cpu_budget=0" in done.output


def test_stray_arguments_fail_as_without_the_plugin(server: Server) -> None:
    done = launch(server, "--enable-xavier-gpu", "--max_model_len", "8", "--lonely")
    assert isinstance(done.exception, IndexError)
    assert server.launches == []


def test_a_changed_host_is_reported_by_an_error() -> None:
    with pytest.raises(KeyError):
        on_cmdline(SimpleNamespace(cli=SimpleNamespace(commands={})))  # type: ignore[arg-type]
