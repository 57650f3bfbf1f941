"""vLLM from 0.27 to 0.32: what the namespace reads of it beyond plain configuration.

Differences are found by looking at the installed code, not at version numbers.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def release() -> str:
    """vLLM's major and minor version; all of it for a development build."""
    from vllm import __version__

    numbers = str(__version__).split(".")
    if len(numbers) < 3 or not numbers[2][:1].isdigit():  # "dev", "0.1.dev7"
        return str(__version__)
    return ".".join(numbers[:2])


def first_hash(algorithm: str) -> bytes | None:
    """What the chain of block hashes will start from, or None where only chance knows.

    EngineCore sets vLLM's ``NONE_HASH`` after the connector has its handshake, from the same seed.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hash_fn = get_hash_fn_by_name(algorithm)
    seed = os.environ.get("PYTHONHASHSEED")
    if hasattr(kv_cache_utils, "resolve_none_hash_seed"):  # later than 0.27
        seed = kv_cache_utils.resolve_none_hash_seed(hash_fn)
    if seed is None:
        return None
    first: bytes = hash_fn(seed)
    return first


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of one block hash."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def tensor_layers(tensor: Any) -> list[str]:
    """Layers of a ``KVCacheTensor``, in order; the attribute's name depends on the version."""
    return list(tensor.shared_by if hasattr(tensor, "shared_by") else tensor.layers)


def kv_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """The order of a page's dimensions, as far as it is a choice of this process.

    Up to 0.27 the environment may choose it; an attention backend of its own mind is a matter of
    the device. Later the engine core settles it.
    """
    from vllm import envs

    for config in (kv_cache_config, vllm_config.cache_config):
        if getattr(config, "kv_cache_layout", None) is not None:
            return str(config.kv_cache_layout)
    return str(envs.VLLM_KV_CACHE_LAYOUT or "default")


def device_kernels() -> str:
    """The device, and what its kernels depend on: they place numbers inside a page.

    On the CPU build vLLM chooses them by instruction set (and by fields of their own).
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        capability = current_platform.get_device_capability()
        number = "" if capability is None else f" {capability.as_version_str()}"
        return f"{current_platform.device_name}{number}"
    checks = ("_is_amx_tile_supported", "_is_avx512_supported", "_is_avx2_supported")
    known = [check for check in checks if getattr(torch.cpu, check, bool)()]
    features = [check.removeprefix("_is_").removesuffix("_supported") for check in known]
    return " ".join(["cpu", platform.machine(), *features])
