"""Launch a model with the snapshot cache through Xinference's REST API, and show the cache.

A server must be running. Environment: XINFERENCE_ENDPOINT, XINFERENCE_API_KEY (when the server
wants one), MODEL_UID, MODEL_PATH (a local folder; without it Xinference downloads the model),
N_GPU ("None" for a machine without a GPU). Arguments ``name=value`` are added to the body, where
a value is JSON: ``python examples/launch_rest.py max_model_len=8192 enforce_eager=true``.
"""

from __future__ import annotations

import json
import os
import sys
import time

import httpx

ENDPOINT = os.environ.get("XINFERENCE_ENDPOINT", "http://127.0.0.1:9997")
MODEL_UID = os.environ.get("MODEL_UID", "cached-qwen")
REPORT_SECONDS = 300


def launch_body(arguments: list[str]) -> dict[str, object]:
    """Body of ``POST /v1/models``: the cache's options stand beside the host's and vLLM's."""
    gpus = os.environ.get("N_GPU", "auto")
    body: dict[str, object] = {
        "model_uid": MODEL_UID,
        "model_name": "qwen2.5-instruct",
        "model_engine": "vllm",
        "model_size_in_billions": "0_5",
        "model_format": "pytorch",
        "model_path": os.environ.get("MODEL_PATH"),
        "n_gpu": None if gpus == "None" else gpus,
        "enable_xavier_gpu": True,
        "xavier_gpu_budget": os.environ.get("GPU_BUDGET", "256MiB"),
        "xavier_cpu_budget": os.environ.get("CPU_BUDGET", "1GiB"),
    }
    for name, _, value in (argument.partition("=") for argument in arguments):
        body[name] = json.loads(value)
    return body


def wait_for_replicas(client: httpx.Client) -> dict[str, object]:
    """The cache's state, once a replica reports: the launch ends before vLLM has loaded."""
    deadline = time.monotonic() + REPORT_SECONDS
    while time.monotonic() < deadline:
        answer = client.get(f"/v1/xavier/{MODEL_UID}")
        if answer.status_code == 200:
            view: dict[str, object] = answer.json()
            replicas = view["replicas"]
            if isinstance(replicas, list) and any(r["stats"] for r in replicas):
                return view
        time.sleep(1)
    raise TimeoutError(f"no replica of {MODEL_UID} has reported for {REPORT_SECONDS} s")


def main() -> int:
    key = os.environ.get("XINFERENCE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=ENDPOINT, headers=headers, timeout=600) as client:
        launched = client.post("/v1/models", json=launch_body(sys.argv[1:]))
        if launched.status_code != 200:
            print(launched.json()["detail"], file=sys.stderr)
            return 1
        print(json.dumps(wait_for_replicas(client), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
