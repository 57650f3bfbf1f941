"""``xinference-xavier doctor`` in this environment, and in broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

from xinference_xavier.host import doctor, probe
from xinference_xavier.host.doctor import Finding, main, render


def findings(monkeypatch: pytest.MonkeyPatch, **answers: dict[str, object]) -> dict[str, Finding]:
    """The report with given answers of the slow probes."""
    monkeypatch.setattr(probe, "ask", lambda name: answers[name])
    return {finding.name: finding for finding in doctor.examine()}


HEALTHY: dict[str, dict[str, object]] = {
    "host": {
        "outcomes": {"xinference.engine_hooks": "active"},
        "attached": {"engine hook": True, "routes": True, "CLI options": True},
        "missing": [],
    },
    "nixl": {"problem": None},
    "cuda": {"devices": [], "pinned": False},
}


def test_this_environment_is_well() -> None:
    command = [sys.executable, "-m", "xinference_xavier.host.probe", "host"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.rpartition(probe._MARK)[2])
    assert set(answer["outcomes"].values()) == {"active"}
    assert answer["attached"] == {"engine hook": True, "routes": True, "CLI options": True}
    assert answer["missing"] == []


def test_a_healthy_report_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    report = findings(monkeypatch, **HEALTHY)
    assert [f for f in report.values() if f.status == "fault"] == []
    assert report["xinference"].detail.startswith(metadata.version("xinference"))
    assert "supported: 0.27 to 0.32" in report["vllm"].detail
    assert report["NIXL backends"].detail == "UCX opened"


def test_every_fault_and_note_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor, "installed_vllm", lambda: "0.11.2")
    monkeypatch.setattr(doctor.site, "getsitepackages", list)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: "/nowhere")
    report = findings(monkeypatch)
    faults = {name for name, finding in report.items() if finding.status == "fault"}
    assert faults == {"xinference", "vllm", "xoscar", "pydantic", "start-up file"}
    assert all(report[name].remedy for name in faults | {"nixl", "gradio", "torch"})


def test_inactive_hooks_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    host = {
        "outcomes": {"xinference.api.routers": "HostChangedError: lacks register_all_routes"},
        "attached": {"engine hook": True, "routes": False, "CLI options": True},
        "missing": ["xinference.api.routers:register_all_routes (wrapped)"],
    }
    report = findings(monkeypatch, **{**HEALTHY, "host": host})
    assert report["engine hook"].status == "ok"
    for name in ("xinference.api.routers", "routes", "host symbols"):
        assert report[name].status == "fault"
        assert report[name].remedy


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        ({"host": {"error": "ImportError: no fastapi"}}, "hooks"),
        ({"nixl": {"error": "no UCX"}}, "NIXL backends"),
        ({"nixl": {"problem": "NIXL has no UCX backend"}}, "NIXL backends"),
        ({"cuda": {"error": "driver too old"}}, "pinned memory"),
        ({"cuda": {"devices": ["H200"], "pinned": False}}, "pinned memory"),
    ],
)
def test_failed_probes_are_faults(
    answers: dict[str, dict[str, object]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = findings(monkeypatch, **{**HEALTHY, **answers})[name]
    assert finding.status == "fault"
    assert finding.remedy


def test_switched_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(doctor.DISABLE_VARIABLE, "1")
    report = findings(monkeypatch, **HEALTHY)
    assert report["hooks"].status == "note"
    assert "routes" not in report


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("fault", 1)])
def test_exit_status_and_json(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding("thing", status, "detail", "remedy")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "examine", lambda: iter([finding]))
    for arguments in (["doctor"], ["doctor", "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    text, _, report = capsys.readouterr().out.partition("{")
    assert render(finding) in text
    assert json.loads("{" + report) == {
        "faults": code,
        "findings": [{"name": "thing", "status": status, "detail": "detail", "remedy": "remedy"}],
    }


def test_a_probe_that_dies_or_hangs_is_an_error() -> None:
    assert "KeyError" in probe.ask("no such probe")["error"]
    assert "no answer within" in probe.ask("host", timeout_seconds=0.01)["error"]


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "doctor" in capsys.readouterr().err
