"""Launch requests: what our switch cannot go with, and what the machine can tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xinference_xavier.config import HASH_ALGORITHM, SWITCH
from xinference_xavier.host import options as launch_options
from xinference_xavier.host.options import check_payload, validate_launch, vllm_problem
from xinference_xavier.types import OptionError

LAUNCH = {SWITCH: True, "model_engine": "vLLM", "model_type": "LLM", "model_name": "qwen"}

CONFLICTS = [
    ("model_engine", {"model_engine": "SGLang"}),
    ("model_type", {"model_type": "embedding"}),
    ("enable_xavier", {"enable_xavier": True}),
    ("enable_xavier", {"enable-xavier": "true"}),
    ("kv_transfer_config", {"kv_transfer_config": {"kv_connector": "NixlConnector"}}),
    ("kv_offloading_size", {"kv_offloading_size": 4}),
    ("replica_config.role", {"replica_config": [{"role": "prefill"}, {"role": "decode"}]}),
    ("enable_prefix_caching", {"enable_prefix_caching": False}),
    ("enable_prefix_caching", {"enable-prefix-caching": "false"}),
    ("enable_prefix_caching", {"enable_prefix_caching": "perhaps"}),
    ("prefix_caching_hash_algo", {"prefix_caching_hash_algo": "xxhash"}),
    ("envs.PYTHONHASHSEED", {"envs": {"PYTHONHASHSEED": "7"}}),
    ("data_parallel_size", {"data_parallel_size": 2}),
    ("data_parallel_size", {"data_parallel_size": "many"}),
    ("enable_weight_cache", {"enable_weight_cache": "true"}),
]


@pytest.mark.parametrize(("named", "arguments"), CONFLICTS)
def test_conflicts_are_refused_with_our_switch_only(
    named: str, arguments: dict[str, object]
) -> None:
    with pytest.raises(OptionError) as caught:
        check_payload({**LAUNCH, **arguments})
    sentence = str(caught.value)
    assert sentence.startswith(f"{named}=")
    assert ". Give " in sentence or ". Drop " in sentence or ". Launch without" in sentence
    without = {**LAUNCH, **arguments}
    del without[SWITCH]
    assert check_payload(without) == (None, [])
    assert validate_launch(without) == (None, [])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"model_engine": "VLLM"},
        {"model_engine": None},  # the host refuses this with a sentence of its own
        {"model_type": None},
        {"enable_xavier": False},
        {"kv_transfer_config": None},
        {"enable_prefix_caching": "True"},
        {"prefix_caching_hash_algo": HASH_ALGORITHM},
        {"envs": {"OMP_NUM_THREADS": "1"}},
        {"envs": None},
        {"data_parallel_size": 1},
        {"data_parallel_size": "1"},
        {"enable_weight_cache": False},
        {"replica_config": [{"role": "hybrid"}]},
        {"replica_config": "nonsense"},
        {"xavier_cache_bytes": 1},
    ],
)
def test_harmless_arguments_pass(arguments: dict[str, object]) -> None:
    options, warnings = check_payload({**LAUNCH, **arguments})
    assert options is not None
    assert warnings == []


def test_a_switched_off_cpu_tier_is_warned_about() -> None:
    _, warnings = check_payload({**LAUNCH, "xavier_cpu_budget": 0})
    assert len(warnings) == 1
    assert "xavier_cpu_budget=0" in warnings[0]


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1", "0.32.9+cu130", "0.30.0rc1", None, "dev"])
def test_supported_or_unknown_vllm(version: str | None) -> None:
    assert vllm_problem(version) is None


@pytest.mark.parametrize("version", ["0.26.9", "0.33.0", "1.0.0", "0.9.2"])
def test_unsupported_vllm(version: str) -> None:
    problem = vllm_problem(version)
    assert problem is not None
    assert f"vLLM {version}" in problem
    assert "0.27 to 0.32" in problem


def test_the_parents_vllm_counts_only_outside_a_virtual_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_options, "installed_vllm", lambda: "0.11.2")
    with pytest.raises(OptionError, match=r"vLLM 0\.11\.2"):
        validate_launch({**LAUNCH, "enable_virtual_env": False})
    assert validate_launch({**LAUNCH, "enable_virtual_env": True})[0] is not None


def test_the_installed_vllm_is_found_without_importing_it() -> None:
    version = launch_options.installed_vllm()
    assert version is not None
    assert vllm_problem(version) is None


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    config = {
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_size": 896,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_budget_below_one_row_is_refused(model_path: str) -> None:
    launch = {**LAUNCH, "model_path": model_path, "block_size": "32", "enable_virtual_env": True}
    row_bytes = 24 * 2 * 2 * 64 * 2 * 32
    for option in ("xavier_gpu_budget", "xavier_cpu_budget"):
        with pytest.raises(OptionError) as caught:
            validate_launch({**launch, option: row_bytes - 1})
        assert str(caught.value).startswith(f"{option}={row_bytes - 1} is below one row")
        assert f"takes {row_bytes} bytes" in str(caught.value)
        assert validate_launch({**launch, option: row_bytes})[0] is not None
    with pytest.raises(OptionError, match=f"takes {2 * row_bytes} bytes"):
        validate_launch({**launch, "xavier_gpu_budget": row_bytes, "dtype": "float32"})
    with pytest.raises(OptionError, match=f"takes {row_bytes // 2} bytes"):
        validate_launch({**launch, "xavier_gpu_budget": 1, "block_size": None})


def test_models_that_cannot_be_read_are_not_judged(tmp_path: Path) -> None:
    for model_path in (None, "", str(tmp_path), 7, str(tmp_path / "config.json")):
        launch = {**LAUNCH, "xavier_gpu_budget": 1, "model_path": model_path}
        assert validate_launch({**launch, "enable_virtual_env": True})[0] is not None
    (tmp_path / "config.json").write_text("[not json")
    launch = {**LAUNCH, "xavier_gpu_budget": 1, "model_path": str(tmp_path)}
    assert validate_launch({**launch, "enable_virtual_env": True})[0] is not None
