"""Arithmetic behind the refusals: rows, device memory, lockable memory, KV pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.budgets import memlock_problem, row_problem, shadow_warning
from xinference_xavier.host.sizing import device_budget_problem, estimate_row_bytes

GIB = 2**30
QWEN = {
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": 32768,
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def test_grouped_query_attention() -> None:
    assert estimate_row_bytes(QWEN, 16) == 24 * 2 * 2 * 64 * 2 * 16
    assert estimate_row_bytes(QWEN | {"head_dim": 128}, 16) == 24 * 2 * 2 * 128 * 2 * 16
    assert estimate_row_bytes(QWEN, 16, dtype="float32") == 24 * 2 * 2 * 64 * 4 * 16
    assert estimate_row_bytes(QWEN, 16, kv_cache_dtype="fp8") == 24 * 2 * 2 * 64 * 16


def test_more_ranks_than_kv_heads_replicate_them() -> None:
    one = estimate_row_bytes(QWEN, 16)
    assert one is not None
    assert estimate_row_bytes(QWEN, 16, tensor_parallel_size=2) == one
    assert estimate_row_bytes(QWEN, 16, tensor_parallel_size=4) == 2 * one


def test_latent_attention_keeps_one_vector_on_every_rank() -> None:
    assert estimate_row_bytes(DEEPSEEK, 64) == 61 * (512 + 64) * 2 * 64
    assert estimate_row_bytes(DEEPSEEK, 64, tensor_parallel_size=8) == 8 * 61 * 576 * 2 * 64


def test_auto_counts_fp32_checkpoints_as_halved() -> None:
    assert estimate_row_bytes(QWEN | {"dtype": "float32"}, 16) == estimate_row_bytes(QWEN, 16)
    assert estimate_row_bytes(QWEN | {"dtype": "torch.float16"}, 16) == estimate_row_bytes(QWEN, 16)


def test_multimodal_models_nest_their_text_part() -> None:
    nested = {"dtype": "bfloat16", "text_config": {k: v for k, v in QWEN.items() if k != "dtype"}}
    assert estimate_row_bytes(nested, 16) == estimate_row_bytes(QWEN, 16)


def test_sliding_windows_everywhere_or_nowhere() -> None:
    uniform = QWEN | {"layer_types": ["full_attention"] * 24}
    assert estimate_row_bytes(uniform, 16) == estimate_row_bytes(QWEN, 16)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 24},
        QWEN | {"dtype": "int3"},
        QWEN | {"dtype": None},
        QWEN | {"num_hidden_layers": "24"},
        QWEN | {"num_hidden_layers": True},
        QWEN | {"use_sliding_window": True},
        QWEN | {"layer_types": ["full_attention", "sliding_attention"] * 12},
        QWEN | {"mamba_d_state": 16},
        QWEN | {"num_kv_shared_layers": 10},
        DEEPSEEK | {"kv_lora_rank": None},
    ],
)
def test_what_cannot_be_known_is_none(config: dict[str, object]) -> None:
    assert estimate_row_bytes(config, 16) is None


def test_unknown_cache_dtype_is_none() -> None:
    assert estimate_row_bytes(QWEN, 16, kv_cache_dtype="nvfp4") is None


def test_row_problem() -> None:
    assert row_problem("xavier_gpu_budget", 0, 100) is None
    assert row_problem("xavier_gpu_budget", 100, 100) is None
    problem = row_problem("xavier_gpu_budget", 99, 100)
    assert problem is not None
    assert "xavier_gpu_budget=99" in problem
    assert "Give at least 100" in problem


def test_device_budget_beside_utilization() -> None:
    assert device_budget_problem(7 * GIB, 80 * GIB, 0.9) is None
    problem = device_budget_problem(10 * GIB, 80 * GIB, 0.9)
    assert problem is not None
    assert f"xavier_gpu_budget={10 * GIB}" in problem
    assert "gpu_memory_utilization=0.9:" in problem
    assert "gpu_memory_utilization=0.87 or less" in problem


def test_ranks_share_the_device_budget() -> None:
    assert device_budget_problem(14 * GIB, 80 * GIB, 0.9, ranks=2) is None
    assert device_budget_problem(18 * GIB, 80 * GIB, 0.9, ranks=2) is not None


def test_a_budget_above_the_device_offers_no_utilization() -> None:
    problem = device_budget_problem(81 * GIB, 80 * GIB, 0.9)
    assert problem is not None
    assert ", or gpu_memory_utilization=" not in problem


@given(
    budget_bytes=st.integers(1, 200 * GIB),
    total_bytes=st.integers(8 * GIB, 192 * GIB),
    utilization=st.floats(0.1, 0.99),
    ranks=st.integers(1, 8),
)
def test_the_values_a_refusal_offers_fit(
    budget_bytes: int, total_bytes: int, utilization: float, ranks: int
) -> None:
    problem = device_budget_problem(budget_bytes, total_bytes, utilization, ranks)
    if problem is None:
        return
    from xinference_xavier.config import parse_size

    remedy = problem.rpartition("Give ")[2]
    offered = parse_size(remedy.partition("xavier_gpu_budget=")[2].partition(" ")[0])
    assert device_budget_problem(offered, total_bytes, utilization, ranks) is None
    if "gpu_memory_utilization=" in remedy:
        lower = float(remedy.partition("gpu_memory_utilization=")[2].partition(" ")[0])
        assert device_budget_problem(budget_bytes, total_bytes, lower, ranks) is None


def test_memlock() -> None:
    assert memlock_problem(GIB, None) is None
    assert memlock_problem(GIB, GIB) is None
    problem = memlock_problem(GIB, 8 * 2**20)
    assert problem is not None
    assert f"xavier_cpu_budget={GIB}" in problem
    assert "ulimit -l unlimited" in problem


def test_shadow_warning() -> None:
    assert shadow_warning(0, 1000) is None
    assert shadow_warning(1000, 1000) is None
    warning = shadow_warning(999, 1000)
    assert warning is not None
    assert "999 tokens" in warning
