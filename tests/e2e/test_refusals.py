"""Launches by REST that are refused: a sentence, status 400, and nothing made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server import ENGINE, Xinference

BODY = {
    "model_uid": "refused",
    "model_name": "qwen2.5-instruct",
    "model_engine": "vllm",
    "model_size_in_billions": "0_5",
    "model_format": "pytorch",
    "n_gpu": None,
    "enable_xavier_gpu": True,
    **ENGINE,
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"xavier_gpu_budget": 65_535}, ("xavier_gpu_budget=65535", "at least 65536")),
        ({"xavier_cpu_budget": "1KiB"}, ("xavier_cpu_budget=1024", "at least 65536")),
        ({"xavier_gpu_budget": 0, "xavier_cpu_budget": 0}, ("xavier_gpu_budget=0", "no tier")),
        ({"xavier_gpu_budget": "4 furlongs"}, ("xavier_gpu_budget='4 furlongs'", "unknown unit")),
        ({"xavier_gpu_budget": True}, ("xavier_gpu_budget=True", "not a size")),
        ({"xavier_cpu_budget": float("nan")}, ("xavier_cpu_budget=nan", "not a finite size")),
        ({"xavier_cpu_budget": -1}, ("xavier_cpu_budget=-1", "negative")),
        ({"xavier_gpu_bugdet": "1GiB"}, ("xavier_gpu_bugdet", "Did you mean xavier_gpu_budget")),
        ({"data_parallel_size": 2}, ("data_parallel_size=2", "replica=N")),
        ({"kv_transfer_config": {"kv_connector": "X"}}, ("kv_transfer_config", "Drop it")),
        ({"enable_xavier": True}, ("enable_xavier=True", "one of the two")),
        ({"enable_prefix_caching": False}, ("enable_prefix_caching=False", "Drop it")),
        ({"model_engine": "transformers"}, ("model_engine='transformers'", "model_engine=vLLM")),
        ({"prefix_caching_hash_algo": "xxhash"}, ("prefix_caching_hash_algo='xxhash'", "Drop it")),
        ({"enable_xavier_gpu": False, "xavier_gpu_budget": 1}, ("does nothing without", "Add")),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_refused_launch_names_option_value_and_remedy(
    server: Xinference, tiny_model: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    before = server.client.get("/v1/models").json()
    body = {**BODY, "model_path": str(tiny_model), **fields}
    # httpx itself refuses to write NaN; other clients don't.
    answer = server.client.post(
        "/v1/models", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    for word in words:
        assert word in answer.json()["detail"]
    assert server.client.get("/v1/models").json() == before
    assert server.client.get("/v1/xavier/refused").status_code == 404
