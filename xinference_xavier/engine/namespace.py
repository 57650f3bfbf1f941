"""The namespace of a replica: all that must agree for its KV bytes to be another's too.

Covers: naming each fact with a short value, so that a difference can be told to people. Does not
cover: who compares and what follows. Runs once in EngineCore, on the scheduler thread, when the
ranks have said what they made room for; reads small parts of the model's files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from xinference_xavier.engine import compat_namespace as compat
from xinference_xavier.engine import content
from xinference_xavier.engine.content import short, unshared, value_digest
from xinference_xavier.engine.messages import RankCapacity
from xinference_xavier.engine.settings import EngineSettings, cluster_secret

#: Changes whenever this package packs the same pages into a row in another way.
ROW_FORMAT = "1"

#: Load formats that take the weights from the model's own files; of any other they are unknown.
FILE_FORMATS = {
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral",
    "gguf", "bitsandbytes", "runai_streamer", "runai_streamer_sharded", "sharded_state",
}  # fmt: skip
#: Those that prefer files of other kinds to safetensors.
_NOT_SAFETENSORS = {"pt", "npcache", "gguf"}

#: What a model's configuration says about places and programs instead of the model.
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
)

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
#: Multimodal settings that change what a picture or sound becomes.
_MULTIMODAL = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "language_model_only",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
#: Parallel sizes by the name they are shown under.
_PARALLEL = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "dcp": "decode_context_parallel_size",
    "interleave": "cp_kv_cache_interleave_size",
}


@dataclass(frozen=True)
class Namespace:
    """Named facts of one replica, each as short text."""

    fields: dict[str, str]

    @property
    def digest(self) -> str:
        """Hex SHA-256 over all fields: equal for replicas whose bytes are interchangeable."""
        return value_digest(self.fields)

    def difference(self, other: Namespace) -> list[str]:
        """Names of the fields that differ, sorted."""
        names = self.fields.keys() | other.fields.keys()
        return sorted(n for n in names if self.fields.get(n) != other.fields.get(n))


def describe(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    ranks: Mapping[tuple[int, int], RankCapacity],
    settings: EngineSettings,
    epoch: int = 0,
) -> Namespace:
    """The namespace of this replica.

    A fact that cannot be found out gets a value of this process alone, and says so.

    Args:
        kv_cache_config: the scheduler's.
        ranks: by (pipeline rank, tensor rank).
        epoch: counts weight updates since the model was loaded.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    fields: dict[str, Callable[[], str]] = {
        "weights": lambda: _weights(model, vllm_config.load_config),
        "revision": lambda: f"{model.revision or '-'}",
        "model": lambda: _model(model),
        "rope": lambda: _rope(model),
        "dtype": lambda: _name(model.dtype),
        "quantization": lambda: _quantization(model),
        "kv_dtype": lambda: _kv_dtype(cache),
        "kv_scales": lambda: _kv_scales(cache),
        "block_size": lambda: _block_size(vllm_config, kv_cache_config),
        "kv_groups": lambda: _kv_groups(kv_cache_config),
        "kv_tensors": lambda: _kv_tensors(kv_cache_config),
        "kv_layout": lambda: compat.kv_layout(vllm_config, kv_cache_config),
        "row_bytes": lambda: _row_bytes(ranks),
        "row_format": lambda: ROW_FORMAT,
        "attention": lambda: _attention(vllm_config),
        "device": compat.device_kernels,
        "parallel": lambda: _parallel(vllm_config.parallel_config),
        "speculative": lambda: _speculative(vllm_config.speculative_config),
        "hash_algorithm": lambda: str(cache.prefix_caching_hash_algo),
        "hash_seed": lambda: _hash_seed(str(cache.prefix_caching_hash_algo)),
        "adapters": lambda: _adapters(settings.adapters),
        "multimodal": lambda: _multimodal(model),
        "vllm": compat.release,
        "epoch": lambda: str(epoch),
    }
    return Namespace({name: find() for name, find in fields.items()})


def _weights(model: Any, load: Any) -> str:
    load_format = _name(load.load_format)
    if load_format not in FILE_FORMATS:
        return unshared(f"load_format={load_format}")
    path = Path(getattr(model, "model_weights", "") or model.model)
    found = content.model_digest(path, load_format not in _NOT_SAFETENSORS)
    if found is None:
        return unshared("unknown weights")
    extra = load.model_loader_extra_config
    return f"{found}, {short(value_digest(extra))}" if extra else str(found)


def _model(model: Any) -> str:
    """Architecture, and a digest of the configuration with all overrides applied."""
    facts = [
        _config_of(model.hf_config),
        _name(getattr(model, "model_impl", "")),
        getattr(model, "model_class_overrides", None),
        model.disable_sliding_window,
        getattr(model, "override_attention_dtype", None),
    ]
    architectures = getattr(model.hf_config, "architectures", None) or ["?"]
    return f"{', '.join(architectures)} {short(value_digest(facts))}"


def _config_of(hf_config: Any) -> Any:
    return _without(hf_config.to_dict(), _NOT_THE_MODEL)


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    if isinstance(value, (list, tuple)):
        return [_without(item, names) for item in value]
    return value


def _rope(model: Any) -> str:
    """Rotary embedding. A long rope chooses its factors by the longest request allowed."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    facts = {"rope": rope, "theta": getattr(text, "rope_theta", None)}
    digest = short(value_digest(facts))
    if "longrope" not in str(rope):
        return digest
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", 0
    )
    return f"{digest}, {'long' if model.max_model_len > original else 'short'} factors"


def _quantization(model: Any) -> str:
    method = _name(model.quantization)
    own = getattr(model, "quantization_config", None)
    return f"{method} {short(value_digest(_plain(own)))}" if own else method


def _kv_dtype(cache: Any) -> str:
    """The dtype asked for; what "auto" becomes shows in the KV groups."""
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    return f"{_name(cache.cache_dtype)}{f' except {skipped}' if skipped else ''}"


def _kv_scales(cache: Any) -> str:
    """Scales found while running are this process's; others belong to the weights."""
    if getattr(cache, "calculate_kv_scales", False):
        return unshared("calculate_kv_scales")
    return "from the weights"


def _block_size(vllm_config: Any, kv_cache_config: Any) -> str:
    """Tokens of a KV block, and of one block hash."""
    return f"{vllm_config.cache_config.block_size}, hashed by " + str(
        compat.hash_block_tokens(vllm_config, kv_cache_config)
    )


def _kv_groups(kv_cache_config: Any) -> str:
    groups = [
        (group.layer_names, _plain(group.kv_cache_spec), group.kv_cache_spec.page_size_bytes)
        for group in kv_cache_config.kv_cache_groups
    ]
    kinds = sorted(
        {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups}
    )
    return f"{len(groups)} ({', '.join(kinds)}) {short(value_digest(groups))}"


def _kv_tensors(kv_cache_config: Any) -> str:
    """Which layers lie together in which order. Says nothing about how many blocks there are."""
    blocks = kv_cache_config.num_blocks
    tensors = [
        (compat.tensor_layers(tensor), tensor.size // blocks, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    return f"{len(tensors)} {short(value_digest(tensors))}"


def _row_bytes(ranks: Mapping[tuple[int, int], RankCapacity]) -> str:
    """Row bytes by rank; in full up to eight ranks."""
    rows = [f"pp{pp} tp{tp} {rank.row_bytes}" for (pp, tp), rank in sorted(ranks.items())]
    if len(rows) <= 8:
        return ", ".join(rows)
    return f"{len(rows)} ranks {short(value_digest(rows))}"


def _attention(vllm_config: Any) -> str:
    """The backends asked for; "auto" is a matter of release and device, which are fields too."""
    config = getattr(vllm_config, "attention_config", None)
    chosen = _name(getattr(config, "backend", None) or "auto")
    per_kind = getattr(config, "backend_per_kind", None)
    return f"{chosen} {short(value_digest(_plain(per_kind)))}" if per_kind else chosen


def _parallel(parallel: Any) -> str:
    return ", ".join(f"{name} {getattr(parallel, size, 1)}" for name, size in _PARALLEL.items())


def _speculative(speculative: Any) -> str:
    """Draft layers have rows too: the draft model must agree as the model must."""
    if speculative is None:
        return "none"
    draft = speculative.draft_model_config
    facts = [speculative.num_speculative_tokens, str(getattr(speculative, "parallel_drafting", ""))]
    if draft is not None:
        facts += [_model(draft), _name(draft.dtype), _quantization(draft)]
        facts.append(_name(getattr(speculative, "kv_cache_dtype", None)))
        found = content.model_digest(Path(draft.model))
        facts.append(unshared("unknown weights") if found is None else found.digest)
    return f"{speculative.method} {short(value_digest(facts))}"


def _hash_seed(algorithm: str) -> str:
    """A digest of the value all block hashes start from, keyed with the cluster's secret.

    Without the key anybody who reads the field could try all seeds, which have 32 bits.
    """
    start = compat.first_hash(algorithm)
    if start is None:
        return unshared("random seed")
    key = cluster_secret()
    if key is None:
        return unshared("no cluster secret")
    return short(hmac.new(key, b"namespace" + start, hashlib.sha256).hexdigest())


def _adapters(adapters: Mapping[str, str]) -> str:
    return f"{len(adapters)} {short(value_digest(adapters))}" if adapters else "none"


def _multimodal(model: Any) -> str:
    config = model.multimodal_config
    if config is None:
        return "none"
    facts = {name: str(getattr(config, name, None)) for name in _MULTIMODAL}
    facts["files"] = content.small_files_digest(Path(model.model), _PROCESSOR_FILES)
    return short(value_digest(facts))


def _plain(value: Any) -> Any:
    """A value of vLLM's configuration as plain data with its class's name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        facts = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"": type(value).__name__, **facts}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def _name(value: Any) -> str:
    """An enumeration's, a dtype's or a text's short name."""
    return str(getattr(value, "name", value)).removeprefix("torch.").lower()
