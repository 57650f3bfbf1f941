"""The namespace on vLLM's real configuration objects; weights are small files, never loaded."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from shapes import HYBRID, PP2, write_model_config
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs

from xinference_xavier.config import XavierOptions
from xinference_xavier.engine import compat_namespace as compat
from xinference_xavier.engine import content
from xinference_xavier.engine.messages import RankCapacity
from xinference_xavier.engine.namespace import Namespace, describe
from xinference_xavier.engine.settings import EngineSettings, pass_secret

#: Above the size up to which a model's file is read whole.
TENSOR = (64, 1024)
TENSORS = 12


def write_weights(file: Path, seed: int, change: str | None = None) -> None:
    """A file of 3 MiB. ``change`` names a tensor that gets other values."""
    random = np.random.default_rng(seed)
    tensors = {f"layer.{i}": random.random(TENSOR, dtype=np.float32) for i in range(TENSORS)}
    if change is not None:
        tensors[change] += 1
    save_file(tensors, file)
    assert file.stat().st_size > content.WHOLE_MODEL_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model_config(tmp_path_factory.mktemp("namespace"))
    write_weights(model / "model.safetensors", seed=1)
    return model


@dataclass
class Case:
    """What ``describe`` is given."""

    config: VllmConfig
    kv: Any
    ranks: dict[tuple[int, int], RankCapacity]
    settings: EngineSettings
    epoch: int = field(default=0)

    def describe(self) -> Namespace:
        return describe(self.config, self.kv, self.ranks, self.settings, self.epoch)


def engine_config(model: Path) -> VllmConfig:
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=4,
        dtype="float32",
        enforce_eager=True,
        max_model_len=96,
        num_gpu_blocks_override=60,
        prefix_caching_hash_algo="sha256_cbor",
        disable_hybrid_kv_cache_manager=False,
    ).create_engine_config()


@pytest.fixture(scope="module")
def original(folder: Path) -> Case:
    config = engine_config(folder)
    if hasattr(config.cache_config, "kv_cache_layout"):  # settled by the engine core
        config.cache_config.kv_cache_layout = "LBHNC"
    kv = generate_scheduler_kv_cache_config(
        get_kv_cache_configs(config, [HYBRID.specs(0)], [2**30])
    )
    ranks = {(0, 0): RankCapacity(10, 10, 4096, 10**6, 60)}
    return Case(config, kv, ranks, EngineSettings(XavierOptions(enable_xavier_gpu=True)))


@pytest.fixture
def case(original: Case) -> Case:
    return copy.deepcopy(original)


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("XINFERENCE_XAVIER_SECRET", "")
    pass_secret(b"s" * 32)


def at(case: Case, folder: Path) -> Case:
    case.config.model_config.model = str(folder)
    return case


# -- what does not matter ------------------------------------------------------------------------


def test_equal_replicas_agree_wherever_they_are(case: Case, folder: Path, tmp_path: Path) -> None:
    here = case.describe()
    assert len(here.digest) == 64
    assert all(isinstance(text, str) and 0 < len(text) < 200 for text in here.fields.values())
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    other = copy.deepcopy(case)
    other.config = engine_config(elsewhere)
    if hasattr(other.config.cache_config, "kv_cache_layout"):
        other.config.cache_config.kv_cache_layout = "LBHNC"
    other.kv.num_blocks *= 2  # a larger pool, more rows, another identity
    for tensor in other.kv.kv_cache_tensors:
        tensor.size *= 2
    other.ranks = {(0, 0): RankCapacity(70, 7, 4096, 10**7, 120)}
    other.settings = replace(other.settings, model_uid="other", replica=3, listen_host="::1")
    there = other.describe()
    assert here.difference(there) == []
    assert here.digest == there.digest


def test_another_process_agrees(case: Case) -> None:
    """Nothing in it depends on this process, its addresses or the order of its dictionaries."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        found = pool.apply(describe_there, (case,))
    assert case.describe().difference(Namespace(found)) == []


def describe_there(case: Case) -> dict[str, str]:
    return case.describe().fields


def test_it_takes_little_time(case: Case, tmp_path: Path) -> None:
    """A model of 120 MiB with 300 tensors takes 3 ms on an idle machine; the best of three here."""
    model = write_model_config(tmp_path / "large")
    tensor = np.zeros((128, 800), dtype=np.float32)
    save_file({f"layer.{i}": tensor for i in range(300)}, model / "model.safetensors")
    assert min(timed(at(case, model)) for _ in range(3)) < 0.05
    assert case.describe().fields["weights"].startswith("1 files, 1229")


def timed(case: Case) -> float:
    """Seconds."""
    began = time.perf_counter()
    case.describe()
    return time.perf_counter() - began


# -- what does -----------------------------------------------------------------------------------


def _model(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: setattr(case.config.model_config, name, value)


def _hf(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: setattr(case.config.model_config.hf_config, name, value)


def _cache(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: setattr(case.config.cache_config, name, value)


def _parallel(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: setattr(case.config.parallel_config, name, value)


def _adapters(**digests: str) -> Callable[[Case], None]:
    return lambda case: setattr(case, "settings", replace(case.settings, adapters=digests))


def _swap_layers(case: Case) -> None:
    case.kv.kv_cache_tensors.reverse()
    for tensor in case.kv.kv_cache_tensors:
        layers = tensor.shared_by if hasattr(tensor, "shared_by") else tensor.layers
        layers.reverse()


def _swap_groups(case: Case) -> None:
    case.kv.kv_cache_groups.reverse()


def _window(case: Case) -> None:
    group = next(g for g in case.kv.kv_cache_groups if hasattr(g.kv_cache_spec, "sliding_window"))
    group.kv_cache_spec = replace(group.kv_cache_spec, sliding_window=33)


def _load_format(name: str) -> Callable[[Case], None]:
    return lambda case: setattr(case.config.load_config, "load_format", name)


def _ranks(shape: dict[tuple[int, int], int]) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.ranks = {rank: RankCapacity(9, 9, size, 10**6, 60) for rank, size in shape.items()}

    return change


DIFFERENCES: dict[str, tuple[Callable[[Case], None], set[str]]] = {
    "dtype": (_model("dtype", torch.bfloat16), {"dtype"}),
    "revision": (_model("revision", "abc"), {"revision"}),
    "quantization": (_model("quantization", "fp8"), {"quantization"}),
    "config": (_hf("rms_norm_eps", 0.1), {"model"}),
    "rope": (_hf("rope_parameters", {"rope_type": "linear", "factor": 2.0}), {"model", "rope"}),
    "window off": (_model("disable_sliding_window", True), {"model"}),
    "kv dtype": (_cache("cache_dtype", "fp8"), {"kv_dtype"}),
    "kv scales": (_cache("calculate_kv_scales", True), {"kv_scales"}),
    "algorithm": (_cache("prefix_caching_hash_algo", "sha256"), {"hash_algorithm", "hash_seed"}),
    "block size": (_cache("block_size", 8), {"block_size"}),
    "layer order": (_swap_layers, {"kv_tensors"}),
    "group order": (_swap_groups, {"kv_groups"}),
    "window": (_window, {"kv_groups"}),
    "row bytes": (_ranks({(0, 0): 8192}), {"row_bytes"}),
    "ranks": (_ranks({(0, 0): 4096, (0, 1): 4096}), {"row_bytes"}),
    "tp": (_parallel("tensor_parallel_size", 2), {"parallel"}),
    "dcp": (_parallel("decode_context_parallel_size", 2), {"parallel", "block_size"}),
    "dummy": (_load_format("dummy"), {"weights"}),
    "unknown format": (_load_format("tensorizer"), {"weights"}),
    "adapter": (_adapters(sql="00" * 32), {"adapters"}),
    "epoch": (lambda case: setattr(case, "epoch", 1), {"epoch"}),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named(name: str, case: Case, original: Case) -> None:
    change, expected = DIFFERENCES[name]
    change(case)
    here, there = original.describe(), case.describe()
    assert set(here.difference(there)) == expected
    assert here.digest != there.digest
    assert here.difference(there) == there.difference(here)


def test_adapter_content_matters_under_one_name(case: Case) -> None:
    other = copy.deepcopy(case)
    _adapters(sql="00" * 32)(case)
    _adapters(sql="11" * 32)(other)
    assert case.describe().difference(other.describe()) == ["adapters"]


def test_ranks_of_pipeline_stages_are_told_apart(case: Case) -> None:
    assert PP2.pipeline_parallel == 2
    other = copy.deepcopy(case)
    _ranks({(0, 0): 4096, (1, 0): 8192})(case)
    _ranks({(0, 0): 8192, (1, 0): 4096})(other)
    assert case.describe().fields["row_bytes"] == "pp0 tp0 4096, pp1 tp0 8192"
    assert case.describe().difference(other.describe()) == ["row_bytes"]


def test_a_long_rope_depends_on_the_longest_request(case: Case) -> None:
    """vLLM takes the long factors when more tokens are allowed than the model was made for."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    case.config.model_config.hf_text_config.rope_parameters = rope
    other = copy.deepcopy(case)
    other.config.model_config.max_model_len = 64
    assert case.describe().difference(other.describe()) == ["rope"]
    assert other.describe().fields["rope"].endswith("short factors")


# -- weights -------------------------------------------------------------------------------------


def rewritten(case: Case, tmp_path: Path, **how: Any) -> Case:
    model = write_model_config(tmp_path / "rewritten")
    write_weights(model / "model.safetensors", **how)
    return at(copy.deepcopy(case), model)


def test_random_weights_of_one_shape_differ(case: Case, tmp_path: Path) -> None:
    here = case.describe()
    assert here.difference(rewritten(case, tmp_path, seed=1).describe()) == []
    assert here.difference(rewritten(case, tmp_path, seed=2).describe()) == ["weights"]


@pytest.mark.parametrize("change", ["layer.0", "layer.7", "layer.11"])
def test_one_changed_tensor_shows(case: Case, tmp_path: Path, change: str) -> None:
    other = rewritten(case, tmp_path, seed=1, change=change)
    assert case.describe().difference(other.describe()) == ["weights"]


@pytest.mark.parametrize("place", [0.0, 0.5, 0.9999])
def test_archives_of_pytorch_are_sampled(tmp_path: Path, place: float) -> None:
    file = tmp_path / "pytorch_model.bin"
    size = 3 << 20
    file.write_bytes(bytes(size))
    first = content.model_digest(tmp_path)
    start = int(place * size)
    file.write_bytes(bytes(start) + b"x" * (size - start))
    assert first is not None
    assert content.model_digest(tmp_path) != first


def test_other_kinds_of_files_count_only_without_safetensors(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "both"
    shutil.copytree(folder, model)
    alone = content.model_digest(model)
    (model / "pytorch_model.bin").write_bytes(b"old")
    assert content.model_digest(model) == alone
    assert content.model_digest(model, safetensors_first=False) != alone


def test_a_broken_header_is_data(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for header in (b"{" + b" " * 15, b'{"a": {"data_offsets": 3}}', b'{"a": 1}', b"[1, 2]", b"{}"):
        data = len(header).to_bytes(8, "little") + header
        file.write_bytes(data.ljust(2 << 20, b"\0"))
        assert content.model_digest(tmp_path) is not None


@pytest.mark.parametrize("missing", ["folder", "files", "content"])
def test_unknown_weights_are_shared_with_nobody(
    case: Case, tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "unknown"
    if missing != "folder":
        model.mkdir()
    if missing == "content":  # a file that opens and cannot be read
        monkeypatch.setattr("os.pread", unreadable)
        write_weights(model / "model.safetensors", seed=1)
    value = at(case, model).describe().fields["weights"]
    assert value == f"unknown weights, shared with nobody: {content.process_token()}"


def unreadable(*_: Any) -> bytes:
    raise OSError(5, "Input/output error")


def test_a_token_is_of_one_process() -> None:
    mine = content.process_token()
    assert content.process_token() == mine
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, content.process_token().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() not in ("", mine)
    os.close(reader)
    os.close(writer)


# -- seed and secret -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256"])
def test_first_hash_is_what_the_engine_will_use(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    assert compat.first_hash(algorithm) == kv_cache_utils.NONE_HASH


def test_seed_and_secret_decide_who_shares(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    here = case.describe()
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert here.difference(case.describe()) == ["hash_seed"]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    pass_secret(b"t" * 32)
    assert here.difference(case.describe()) == ["hash_seed"]
    pass_secret(None)
    assert case.describe().fields["hash_seed"].startswith("no cluster secret, shared with nobody")


def test_without_a_seed_nobody_shares(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        pytest.skip("this vLLM has a fixed seed of its own")
    monkeypatch.delenv("PYTHONHASHSEED")
    assert case.describe().fields["hash_seed"].startswith("random seed, shared with nobody")


def test_no_field_tells_the_secret_or_the_seed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "3141592653")
    first = compat.first_hash("sha256_cbor")
    assert first is not None
    told = json.dumps(case.describe().fields)
    for hidden in ("3141592653", (b"s" * 32).hex(), first.hex(), first.hex()[:16]):
        assert hidden not in told


# -- adapters ------------------------------------------------------------------------------------


def write_adapter(folder: Path, seed: int, alpha: int = 8) -> str:
    folder.mkdir(parents=True)
    values = np.random.default_rng(seed).random(8, dtype=np.float32)
    save_file({"a": values}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
    return str(folder)


def test_adapters_are_known_by_their_content(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "1", seed=1)
    copied = write_adapter(tmp_path / "2", seed=1)
    trained = write_adapter(tmp_path / "3", seed=2)
    scaled = write_adapter(tmp_path / "4", seed=1, alpha=16)
    folders = {"a": first, "b": copied, "c": trained, "d": scaled, "e": str(tmp_path / "none")}
    found = content.adapter_digests(list(folders.items()))
    assert found["a"] == found["b"]
    assert len({found[name] for name in "acde"}) == 4
    assert found["e"].startswith("unknown adapter, shared with nobody")
    assert content.adapter_digests([("x", first), ("x", trained)]) == {"x": found["a"]}
    assert content.adapter_digests([]) == {}
