"""Launch a model with the snapshot cache through Xinference's Python client, and ask it something.

A server must be running. Environment: XINFERENCE_ENDPOINT, XINFERENCE_API_KEY (when the server
wants one), MODEL_UID, MODEL_PATH (a local folder; without it Xinference downloads the model),
N_GPU ("None" for a machine without a GPU). Arguments ``name=value`` become keyword arguments,
where a value is JSON: ``python examples/launch_python.py max_model_len=8192 enforce_eager=true``.
"""

from __future__ import annotations

import json
import os
import sys
import time

from xinference.client import Client

ENDPOINT = os.environ.get("XINFERENCE_ENDPOINT", "http://127.0.0.1:9997")
LOAD_SECONDS = 300


def launch(client: Client, arguments: list[str]) -> str:
    """Launch; returns the model's uid. A wrong option raises with the server's sentence."""
    gpus = os.environ.get("N_GPU", "auto")
    pairs = (argument.partition("=") for argument in arguments)
    uid: str = client.launch_model(
        model_uid=os.environ.get("MODEL_UID", "cached-qwen"),
        model_name="qwen2.5-instruct",
        model_engine="vllm",
        model_size_in_billions="0_5",
        model_format="pytorch",
        model_path=os.environ.get("MODEL_PATH"),
        n_gpu=None if gpus == "None" else gpus,
        enable_xavier_gpu=True,
        xavier_gpu_budget=os.environ.get("GPU_BUDGET", "256MiB"),
        xavier_cpu_budget=os.environ.get("CPU_BUDGET", "1GiB"),
        **{name: json.loads(value) for name, _, value in pairs},
    )
    return uid


def ask(client: Client, uid: str, question: str) -> str:
    """One answer. Tries again while vLLM loads, which goes on after the launch has ended."""
    deadline = time.monotonic() + LOAD_SECONDS
    messages = [{"role": "user", "content": question}]
    while True:
        try:
            answer = client.get_model(uid).chat(messages, generate_config={"max_tokens": 16})
            return str(answer["choices"][0]["message"]["content"])
        except RuntimeError as error:
            if "loading" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)


def main() -> None:
    client = Client(ENDPOINT, api_key=os.environ.get("XINFERENCE_API_KEY"))
    uid = launch(client, sys.argv[1:])
    print(f"{uid}: {ask(client, uid, 'Who are you?')}")


if __name__ == "__main__":
    main()
