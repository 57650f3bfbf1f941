"""What ``xinference-xavier doctor`` looks at in processes of its own, one per question.

Covers: importing the host with our hooks, opening NIXL, pinning memory. Does not cover: judging
the answers (``doctor``). Each probe may take seconds, print to stdout or die, hence the separate
process: ``python -m xinference_xavier.host.probe NAME`` ends with one marked line of JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_MARK = "xinference-xavier-probe:"


def ask(name: str, timeout_seconds: float = 120) -> dict[str, Any]:
    """Answer of one probe; ``{"error": sentence}`` when it failed, died or took too long."""
    command = [sys.executable, "-m", __name__, name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_seconds:g} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return answer
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": f"the probe ended with status {done.returncode}: {last}"}


def _host() -> dict[str, Any]:
    """Import every hooked host module, and look whether what we attach is really there."""
    from xinference_xavier.host import bootstrap, compat

    # The order of every host process: the model registry imports the engine hooks.
    importlib.import_module("xinference.model.llm")
    attached = {"engine hook": _engine_hook, "routes": _routes, "CLI options": _cli_options}
    for name in bootstrap.HOOKS:
        importlib.import_module(name)
    return {
        "outcomes": dict(bootstrap.outcomes),
        "attached": {what: bool(look()) for what, look in attached.items()},
        "missing": [f"{symbol} ({symbol.why})" for symbol in compat.missing()],
    }


def _engine_hook() -> bool:
    hooks = importlib.import_module("xinference.engine_hooks")._ENGINE_REGISTRATION_HOOKS
    return any(hook.__module__.startswith("xinference_xavier.") for hook in hooks.get("LLM", ()))


def _routes() -> bool:
    register = importlib.import_module("xinference.api.routers").register_all_routes
    code = getattr(register, "__code__", None)
    return code is not None and "xinference_xavier" in code.co_filename


def _cli_options() -> bool:
    launch = importlib.import_module("xinference.deploy.cmdline").cli.commands["launch"]
    return any(parameter.name == "enable_xavier_gpu" for parameter in launch.params)


def _nixl() -> dict[str, Any]:
    from xinference_xavier.storage.nixl_agent import nixl_problem

    return {"problem": nixl_problem()}


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"devices": []}
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).is_pinned()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"devices": names, "pinned": pinned}


_PROBES: dict[str, Callable[[], dict[str, Any]]] = {"host": _host, "nixl": _nixl, "cuda": _cuda}


def main(name: str) -> None:
    """Run one probe and print its answer."""
    try:
        answer = _PROBES[name]()
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
