"""What a replica of the harness looks like: its layers, ranks, tiers and vLLM's configuration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fake_model import WORDS
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from xinference_xavier.config import XavierOptions
from xinference_xavier.engine.settings import EngineSettings

#: Bytes of one token in one layer, and tokens of a block.
TOKEN_BYTES = WORDS * 8
BLOCK = 4


@dataclass(frozen=True)
class Shape:
    """A replica.

    Attributes:
        layers: per rank, the window of each layer (None: full attention).
        tensor_parallel, pipeline_parallel: their product is the number of ranks.
        blocks: blocks of the engine's own KV pool, of which one is never used.
        gpu_rows, cpu_rows: rows of the tiers.
        batch_tokens: tokens per step; longer prompts are prefilled in chunks.
        overlapped: two steps in flight, as with vLLM's asynchronous scheduling.
    """

    layers: tuple[tuple[int | None, ...], ...] = ((None, None), (None, None))
    tensor_parallel: int = 2
    pipeline_parallel: int = 1
    blocks: int = 25
    gpu_rows: int = 12
    cpu_rows: int = 60
    batch_tokens: int = 32
    max_model_len: int = 96
    overlapped: bool = False
    #: Which replica of which cluster (address of the tracker), and its options' differences.
    model_uid: str = "m"
    replica: int = 0
    tracker: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def row_bytes(self) -> int:
        """Of the rank with the largest rows. Groups of a hybrid model share their tensors."""
        return max(max(Counter(layers).values()) for layers in self.layers) * BLOCK * TOKEN_BYTES

    def names(self, rank: int) -> list[str]:
        """Layer names of a rank: those of all tensor-parallel ranks are the same."""
        first = 0
        if self.pipeline_parallel > 1:
            first = sum(len(layers) for layers in self.layers[:rank])
        return [f"model.layers.{first + i}.attn" for i in range(len(self.layers[rank]))]

    def specs(self, rank: int) -> dict[str, KVCacheSpec]:
        names = self.names(rank)
        return {n: _spec(w) for n, w in zip(names, self.layers[rank], strict=True)}


TP2 = Shape()
PP2 = Shape(layers=((None, None, None), (None, None)), tensor_parallel=1, pipeline_parallel=2)
#: Two KV groups that share their tensors: a sliding window of ten tokens, and full attention.
HYBRID = Shape(layers=((None, 10), (None, 10)), blocks=41, gpu_rows=16, cpu_rows=80)


def _spec(window: int | None) -> KVCacheSpec:
    base = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float32}
    if window is None:
        return FullAttentionSpec(**base)
    return SlidingWindowSpec(**base, sliding_window=window)


def write_model_config(folder: Path) -> Path:
    """A configuration without weights; nothing here loads a model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_config(shape: Shape, model: Path, rank: int) -> VllmConfig:
    options = XavierOptions(
        enable_xavier_gpu=True,
        xavier_gpu_budget=shape.gpu_rows * shape.row_bytes * shape.ranks,
        xavier_cpu_budget=shape.cpu_rows * shape.row_bytes * shape.ranks,
        xavier_self_check=1.0,
        **shape.options,
    )
    settings = EngineSettings(options, shape.model_uid, shape.replica, shape.tracker)
    engine: dict[str, Any] = {}
    if hasattr(EngineArgs, "prefix_cache_retention_interval"):
        # Later versions keep a sliding window's blocks at the end of the prompt only, by default.
        engine["prefix_cache_retention_interval"] = None
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=BLOCK,
        dtype="float32",
        enforce_eager=True,
        max_model_len=shape.max_model_len,
        max_num_batched_tokens=shape.batch_tokens,
        max_num_seqs=8,
        tensor_parallel_size=shape.tensor_parallel,
        pipeline_parallel_size=shape.pipeline_parallel,
        num_gpu_blocks_override=shape.blocks,
        prefix_caching_hash_algo="sha256_cbor",
        disable_hybrid_kv_cache_manager=False,
        kv_transfer_config=settings.transfer_config(),
        **engine,
    ).create_engine_config()
    config.parallel_config.rank = rank
    if hasattr(config.cache_config, "kv_cache_layout"):  # 0.28 on: resolved by the engine core
        config.cache_config.kv_cache_layout = "LBHNC"
    config.scheduler_config.async_scheduling = shape.overlapped
    return config


def allocate(kv_config: Any) -> dict[str, torch.Tensor]:
    """KV caches ``[blocks, 1, tokens, floats]`` by layer name, as the model runner makes them."""
    floats = TOKEN_BYTES // 4
    size = (kv_config.num_blocks, 1, BLOCK, floats)
    views = {}
    backing: torch.Tensor | None = None
    for tensor in kv_config.kv_cache_tensors:
        if hasattr(tensor, "shared_by"):  # up to 0.27: one allocation per tensor
            memory = torch.zeros(tensor.size // 4)
            views |= {name: memory.view(size) for name in tensor.shared_by}
            continue
        if backing is None:  # later: all tensors are places in one allocation
            backing = torch.zeros(tensor.size // 4)
        for index, name in enumerate(tensor.layers):
            offset = (tensor.offset + index * tensor.layer_stride) // 4
            strides = (tensor.block_stride // 4, BLOCK * floats, floats, 1)
            views[name] = backing.as_strided(size, strides, offset)
    return views
