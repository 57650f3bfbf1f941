"""Engine classes against Xinference's own, on real model families, without starting an engine."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xinference")
pytest.importorskip("vllm")

from xinference.model.llm import llm_family
from xinference.model.llm.vllm.core import VLLMChatModel, VLLMModel, VLLMMultiModel
from xinference.types import LoRA

from xinference_xavier.engine import settings
from xinference_xavier.engine.content import adapter_digests
from xinference_xavier.engine.settings import EngineSettings
from xinference_xavier.host.engine.classes import (
    REPLACEMENTS,
    XavierVLLMChatModel,
    XavierVLLMModel,
    XavierVLLMMultiModel,
)
from xinference_xavier.host.engine.register import replace_classes
from xinference_xavier.host.identity import Identity

FAMILIES = {
    VLLMModel: ("qwen2.5", "pytorch", "0_5", "none"),
    VLLMChatModel: ("qwen2.5-instruct", "pytorch", "0_5", "none"),
    VLLMMultiModel: ("qwen2.5-vl-instruct", "pytorch", 3, "none"),
}

LAUNCH = {"max_model_len": 4096, "block_size": 32, "max_num_seqs": 8}
SWITCH = {"enable_xavier_gpu": True, "xavier_gpu_budget": "16MiB"}


def build(cls: type, path: Path, launch: dict[str, Any]) -> Any:
    host = next(base for base in FAMILIES if cls in (base, REPLACEMENTS[base]))
    family = llm_family.match_llm(*FAMILIES[host])
    assert family is not None
    model = cls("m-rep1", family, str(path), launch)
    model._device_count = 0
    return model


def sanitize(model: Any) -> dict[str, Any]:
    return model._sanitize_model_config(model._model_config)


def test_registry_holds_our_classes_and_keeps_unknown_ones() -> None:
    class Foreign:
        pass

    engines = {"vLLM": [VLLMModel, Foreign, VLLMMultiModel], "SGLang": [Foreign]}
    replace_classes(engines)
    assert engines["vLLM"] == [XavierVLLMModel, Foreign, XavierVLLMMultiModel]
    assert engines["SGLang"] == [Foreign]
    assert list(REPLACEMENTS) == [VLLMModel, VLLMChatModel, VLLMMultiModel]


@pytest.mark.parametrize("host", FAMILIES)
def test_launch_without_the_switch_is_the_hosts_alone(host: type, tmp_path: Path) -> None:
    launch = dict(LAUNCH)
    ours = build(REPLACEMENTS[host], tmp_path, launch)
    assert ours._model_config is launch
    assert sanitize(ours) == sanitize(build(host, tmp_path, dict(LAUNCH)))


@pytest.mark.parametrize("host", FAMILIES)
def test_switch_adds_the_connector_and_takes_our_options_out(host: type, tmp_path: Path) -> None:
    plain = sanitize(build(host, tmp_path, dict(LAUNCH)))
    model = build(REPLACEMENTS[host], tmp_path, {**LAUNCH, **SWITCH})
    model.set_identity(Identity("m", 1, "s:1", "127.0.0.1:2"))
    found = sanitize(model)
    added = {name: found.pop(name) for name in set(found) - set(plain)}
    assert set(added) == {
        "kv_transfer_config",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
    }
    assert added["enable_prefix_caching"] is True
    assert added["prefix_caching_hash_algo"] == "sha256_cbor"
    ours = added["kv_transfer_config"]["kv_connector_extra_config"]["xavier"]
    assert (ours["model_uid"], ours["replica"], ours["tracker_address"]) == ("m", 1, "s:1")
    assert ours["xavier_gpu_budget"] == 16 * 1024**2
    changed = {name for name in plain if plain[name] != found[name]}
    # On vLLM's CPU build the host's tensor parallel size is its number of GPUs, 0.
    assert changed == ({"tensor_parallel_size"} if plain["tensor_parallel_size"] == 0 else set())
    assert found["tensor_parallel_size"] == 1


def test_chosen_parallel_size_stays(tmp_path: Path) -> None:
    launch = {**LAUNCH, **SWITCH, "tensor_parallel_size": 2}
    assert sanitize(build(XavierVLLMChatModel, tmp_path, launch))["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({**SWITCH, "kv_transfer_config": {}}, "kv_transfer_config"),
        ({**SWITCH, "enable_xavier": True}, "enable_xavier"),
        ({**SWITCH, "xavier_gpu_budget": "4 furlongs"}, "4 furlongs"),
        ({**SWITCH, "xavier_gpu_bugdet": 1}, "Did you mean xavier_gpu_budget"),
        ({"xavier_gpu_budget": "1GiB"}, "enable_xavier_gpu"),
    ],
)
def test_bad_launches_that_went_round_the_api_fail_in_the_worker(
    launch: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        build(XavierVLLMChatModel, tmp_path, copy.deepcopy(launch))
    # A class that a supervisor without this package can unpickle.
    assert type(caught.value) is ValueError


def test_unsupported_vllm_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(XavierVLLMChatModel, tmp_path, {**LAUNCH, **SWITCH})
    monkeypatch.setattr("vllm.__version__", "0.11.2")
    with pytest.raises(ValueError, match=r"vLLM 0\.11\.2"):
        model.load()


@pytest.mark.parametrize("sentence", ["", "xavier_gpu_budget=1000 is below one row"])
def test_an_engine_that_fails_is_explained_by_its_own_words(
    sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Any) -> None:
        extra = sanitize(self)["kv_transfer_config"]["kv_connector_extra_config"]
        Path(extra["xavier"]["last_words"]).write_text(sentence)

    def wait_for_load(self: Any) -> None:
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr(VLLMModel, "load", load)
    monkeypatch.setattr(VLLMModel, "wait_for_load", wait_for_load)
    model = build(XavierVLLMModel, tmp_path, {**LAUNCH, **SWITCH})
    model.load()
    assert model._words.path.exists()
    with pytest.raises((ValueError, RuntimeError), match=sentence or "Engine core"):
        model.wait_for_load()
    assert not model._words.path.exists()


def test_loading_finds_out_what_sharing_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secret in the environment, adapters and the reason in the settings."""
    secret, told = b"s" * 32, {}

    async def cluster_secret(identity: Identity) -> bytes:
        told["asked"] = identity
        return secret

    def load(self: Any) -> None:
        config = sanitize(self)["kv_transfer_config"]
        told["settings"] = EngineSettings.from_extra(config["kv_connector_extra_config"])
        told["secret"] = settings.cluster_secret()
        told["config"] = json.dumps(config)

    for name in ("PYTHONHASHSEED", "XINFERENCE_XAVIER_SECRET", "XOSCAR_AUTH_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("xinference_xavier.host.engine.classes.cluster_secret", cluster_secret)
    monkeypatch.setattr(VLLMModel, "load", load)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"1234")
    model = build(XavierVLLMModel, tmp_path, {**LAUNCH, **SWITCH})
    model.lora_modules = [LoRA("sql", str(adapter))]
    who = Identity("m", 1, None, "10.0.0.2:9001")
    model.set_identity(who)
    model.load()
    model._close_start()
    assert told["asked"] == who
    assert told["secret"] == secret
    assert secret.hex() not in told["config"]
    assert told["settings"].adapters == adapter_digests([("sql", str(adapter))])
    assert "XOSCAR_AUTH_KEY" in told["settings"].share_problem
    assert os.environ["PYTHONHASHSEED"].isdigit()


def test_host_tier_above_the_locked_memory_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where an RDMA device locks what it reads; simulated, there is none here."""
    limit = (8 * 1024**2, 8 * 1024**2)
    monkeypatch.setattr("resource.getrlimit", lambda _: limit)
    launch = {**LAUNCH, **SWITCH, "xavier_cpu_budget": "1GiB"}
    build(XavierVLLMChatModel, tmp_path, launch)
    monkeypatch.setattr("xinference_xavier.budgets.registration_locks_memory", lambda: True)
    with pytest.raises(ValueError, match="xavier_cpu_budget=1073741824 is above the limit"):
        build(XavierVLLMChatModel, tmp_path, launch)


def test_classes_are_ours_when_the_engine_hooks_are_imported_first(tmp_path: Path) -> None:
    code = (
        "import xinference.engine_hooks;"
        "from xinference.model.llm.llm_family import SUPPORTED_ENGINES;"
        "assert SUPPORTED_ENGINES['vLLM'][1].__name__ == 'XavierVLLMChatModel'"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=300,
        env={**os.environ, "XINFERENCE_HOME": str(tmp_path)},
    )


def test_instance_unpickles_first_thing_in_a_new_process(tmp_path: Path) -> None:
    """The way into a model process: nothing of Xinference's models is imported before."""
    model = build(XavierVLLMChatModel, tmp_path, {**LAUNCH, **SWITCH})
    target = tmp_path / "model.pickle"
    target.write_bytes(pickle.dumps(model))
    code = (
        "import pickle, sys; model = pickle.load(open(sys.argv[1], 'rb'));"
        "from xinference.model.llm.llm_family import SUPPORTED_ENGINES;"
        "names = [c.__name__ for c in SUPPORTED_ENGINES['vLLM']];"
        "assert names[:3] == ['XavierVLLMModel', 'XavierVLLMChatModel', 'XavierVLLMMultiModel'];"
        "assert type(model) is SUPPORTED_ENGINES['vLLM'][1];"
        "assert model._xavier['xavier_gpu_budget'] == 16 * 1024**2"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(target)],
        check=True,
        timeout=300,
        env={**os.environ, "XINFERENCE_HOME": str(tmp_path)},
    )
