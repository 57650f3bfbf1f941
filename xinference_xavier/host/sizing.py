"""What a launch can tell of sizes before its engine runs: a model's rows, room on a device.

Covers: estimates from a model's configuration and arithmetic over numbers that the caller has
read. Does not cover: the engine's exact figures (``engine/sizing.py``) and the sentences for both
(``budgets.py``). Used in the API process and by the engine class in the model process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xinference_xavier.config import format_size

_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}

#: Keys of a model configuration whose layers do not all keep the same kind of KV block. How many
#: bytes their rows take is known once the engine has laid out its cache, not before.
_HYBRID_KEYS = (
    "attention_chunk_size",
    "attn_layer_period",
    "layers_block_type",
    "linear_num_key_heads",
    "mamba_d_state",
    "num_kv_shared_layers",
    "sliding_window_pattern",
    "ssm_cfg",
)


def read_model_config(model_path: str | None) -> dict[str, Any] | None:
    """The ``config.json`` of a local model folder, or None when there is none to read."""
    if not isinstance(model_path, str) or not model_path:
        return None
    try:
        loaded = json.loads(Path(model_path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def estimate_row_bytes(
    model_config: Mapping[str, Any],
    block_size: int,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
) -> int | None:
    """Bytes that one block of ``block_size`` tokens takes in one replica, over all its ranks.

    None when the configuration does not tell: unknown fields or dtypes, or layers of several
    kinds. Where the dtype is the engine's choice the smallest possible one counts, so that a
    budget above the true row is never refused.
    """
    text = _text_config(model_config)
    value_bytes = _value_bytes(text, dtype, kv_cache_dtype)
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
    values = _values_per_token(text, tensor_parallel_size)
    if not (value_bytes and layers and values) or _is_hybrid(text):
        return None
    return layers * values * value_bytes * block_size


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config") or config.get("llm_config")
    if not isinstance(nested, Mapping):
        return config
    # The dtype of a multimodal model often stands outside its text part.
    return {**{k: config[k] for k in ("dtype", "torch_dtype") if k in config}, **nested}


def _count(config: Mapping[str, Any], *keys: str) -> int | None:
    """First of ``keys`` that holds a positive integer."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _value_bytes(config: Mapping[str, Any], dtype: str, kv_cache_dtype: str) -> int | None:
    if kv_cache_dtype != "auto":
        return _DTYPE_BYTES.get(kv_cache_dtype)
    if dtype != "auto":
        return _DTYPE_BYTES.get(dtype)
    named = str(config.get("dtype") or config.get("torch_dtype") or "").rpartition(".")[2]
    size = _DTYPE_BYTES.get(named)
    # vLLM's "auto" halves fp32 checkpoints.
    return min(size, 2) if size else None


def _values_per_token(config: Mapping[str, Any], tensor_parallel_size: int) -> int | None:
    """Numbers that one layer keeps for a token, over all tensor-parallel ranks."""
    if "kv_lora_rank" in config:
        latent = _count(config, "kv_lora_rank")
        rope = _count(config, "qk_rope_head_dim")
        # Multi-head latent attention keeps one vector, and every rank keeps all of it.
        return (latent + rope) * tensor_parallel_size if latent and rope else None
    heads = _count(config, "num_attention_heads", "n_head")
    kv_heads = _count(config, "num_key_value_heads", "num_kv_heads") or heads
    hidden = _count(config, "hidden_size", "n_embd")
    head_dim = _count(config, "head_dim") or (hidden // heads if hidden and heads else None)
    if not kv_heads or not head_dim:
        return None
    return 2 * max(kv_heads, tensor_parallel_size) * head_dim


def _is_hybrid(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
        return True
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    if slides and not kinds:
        return True
    return any(config.get(key) for key in _HYBRID_KEYS)


def device_budget_problem(
    budget_bytes: int, total_bytes: int, gpu_memory_utilization: float, ranks: int = 1
) -> str | None:
    """Why the GPU budget does not fit on a device beside vLLM's share, or None.

    ``budget_bytes`` is of the whole replica, ``total_bytes`` of one device; ``ranks`` devices
    share the budget evenly.
    """
    rank_bytes = math.ceil(budget_bytes / ranks)
    left_bytes = max(0, int(total_bytes * (1 - gpu_memory_utilization)))
    if rank_bytes <= left_bytes:
        return None
    mebibyte = 1024**2
    fits = format_size(left_bytes * ranks // mebibyte * mebibyte)
    utilization = math.floor((1 - rank_bytes / total_bytes) * 100) / 100
    remedy = f"Give xavier_gpu_budget={fits} or less"
    if utilization > 0:
        remedy += f", or gpu_memory_utilization={utilization:.2f} or less"
    return (
        f"xavier_gpu_budget={budget_bytes} does not fit beside "
        f"gpu_memory_utilization={gpu_memory_utilization}: each of {ranks} device(s) of "
        f"{total_bytes} bytes has {left_bytes} left for the {rank_bytes} it must hold. {remedy}."
    )
