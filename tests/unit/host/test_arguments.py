"""Launch options as engine arguments; vLLM's own configuration class judges the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from xinference_xavier.config import XavierOptions
from xinference_xavier.engine import settings
from xinference_xavier.host.engine import arguments
from xinference_xavier.host.identity import Identity
from xinference_xavier.types import OptionError

GIB = 1024**3
IDENTITY = Identity("m", 2, "10.0.0.1:9000", "10.0.0.2:9001")


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``arguments`` writes into the environment; afterwards it is what it was."""
    for name in (arguments.SEED_VARIABLE, settings.SECRET_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def options(**fields: object) -> XavierOptions:
    return XavierOptions(enable_xavier_gpu=True, **fields)


def transfer_config(options: XavierOptions, **found: Any) -> dict[str, Any]:
    return replace(arguments.settings_of(options, IDENTITY), **found).transfer_config()


def test_transfer_config_names_the_connector_and_the_replica() -> None:
    config = transfer_config(options(xavier_gpu_budget="1GiB"), local_replicas=3)
    assert json.loads(json.dumps(config)) == config
    extra = config["kv_connector_extra_config"]
    assert extra["offload_prompt_only"] is False
    ours = dict(extra["xavier"])
    assert ours.pop("xavier_gpu_budget") == GIB
    assert {k: v for k, v in ours.items() if k not in XavierOptions.model_fields} == {
        "model_uid": "m",
        "replica": 2,
        "tracker_address": "10.0.0.1:9000",
        "listen_host": "10.0.0.2",
        "local_replicas": 3,
        "last_words": None,
        "adapters": {},
        "share_problem": None,
    }


def test_vllm_accepts_the_transfer_config() -> None:
    kv_transfer = pytest.importorskip("vllm.config").KVTransferConfig
    parsed = kv_transfer(**transfer_config(options()))
    assert parsed.is_kv_producer
    assert parsed.is_kv_consumer
    assert parsed.kv_load_failure_policy == "recompute"


def test_engine_settings_read_what_the_host_wrote() -> None:
    settings = pytest.importorskip("xinference_xavier.engine.settings").EngineSettings
    found = {"local_replicas": 3, "adapters": {"sql": "ab"}, "share_problem": "No."}
    config = transfer_config(options(xavier_policy="lru"), **found)
    read = settings.from_extra(config["kv_connector_extra_config"])
    assert read.options == options(xavier_policy="lru")
    assert (read.model_uid, read.replica, read.local_replicas) == ("m", 2, 3)
    assert (read.adapters, read.share_problem) == ({"sql": "ab"}, "No.")
    assert (read.tracker_address, read.listen_host) == ("10.0.0.1:9000", "10.0.0.2")


@pytest.mark.parametrize("keep", [True, False])
def test_decoded_blocks_are_kept_as_asked(keep: bool) -> None:
    config = transfer_config(options(xavier_store_decode=keep))
    assert config["kv_connector_extra_config"]["offload_prompt_only"] is not keep


def device(**fields: object) -> dict[str, object]:
    base: dict[str, object] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "gpu_memory_utilization": 0.90,
    }
    return {**base, **fields}


def test_budget_that_fits_changes_nothing() -> None:
    for explicit in (True, False):
        config = device()
        arguments.fit_device(config, 8 * GIB, 100 * GIB, explicit)
        assert config == device()


def test_default_share_is_lowered_until_the_budget_fits() -> None:
    config = device()
    arguments.fit_device(config, 20 * GIB, 100 * GIB, explicit=False)
    share = config["gpu_memory_utilization"]
    assert share == pytest.approx(0.78)
    assert share * 100 * GIB + 20 * GIB < 100 * GIB


def test_ranks_share_the_budget() -> None:
    config = device(tensor_parallel_size=2, pipeline_parallel_size=2)
    arguments.fit_device(config, 39 * GIB, 100 * GIB, explicit=True)
    assert config["gpu_memory_utilization"] == 0.90


def test_chosen_share_is_refused_not_changed() -> None:
    config = device(gpu_memory_utilization=0.95)
    with pytest.raises(OptionError, match=r"xavier_gpu_budget=5GiB or less"):
        arguments.fit_device(config, 20 * GIB, 100 * GIB, explicit=True)
    assert config["gpu_memory_utilization"] == 0.95


def test_budget_above_the_device_is_refused_even_by_default() -> None:
    with pytest.raises(OptionError, match="does not fit"):
        arguments.fit_device(device(), 101 * GIB, 100 * GIB, explicit=False)


def test_seed_without_a_secret_is_random_and_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = set()
    for given in (None, "random", None):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if given is not None:
            monkeypatch.setenv("PYTHONHASHSEED", given)
        arguments.ensure_hash_seed(None)
        seeds.add(os.environ["PYTHONHASHSEED"])
    assert len(seeds) == 3
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)


def test_seed_follows_from_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica of a cluster finds the same one, another cluster another one."""
    seeds = []
    for secret in (b"a" * 32, b"a" * 32, b"b" * 32):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        arguments.ensure_hash_seed(secret)
        seeds.append(os.environ["PYTHONHASHSEED"])
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= int(seed) < 2**32 for seed in seeds)


def test_seed_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    arguments.ensure_hash_seed(b"a" * 32)
    assert os.environ["PYTHONHASHSEED"] == "7"


def test_secret_reaches_children_and_no_log() -> None:
    """The engine reads it from its environment; what is logged is the transfer config."""
    secret = bytes(range(32))
    settings.pass_secret(secret)
    assert settings.cluster_secret() == secret
    code = "from xinference_xavier.engine import settings as s; print(s.cluster_secret().hex())"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout.strip() == secret.hex()
    config: dict[str, Any] = {}
    arguments.set_engine_arguments(config, arguments.settings_of(options(), IDENTITY))
    assert secret.hex() not in json.dumps(config) + arguments.describe(config)
    settings.pass_secret(None)
    assert settings.cluster_secret() is None
    assert settings.SECRET_VARIABLE not in os.environ


@pytest.mark.parametrize("keep", [True, False])
def test_windows_are_kept_for_decoded_blocks(monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    """Later vLLMs drop them by default; the installed one has no such argument."""
    config: dict[str, Any] = {}
    launch = arguments.settings_of(options(xavier_store_decode=keep), IDENTITY)
    arguments.set_engine_arguments(config, launch)
    assert arguments.RETENTION not in config
    monkeypatch.setattr(EngineArgs, arguments.RETENTION, 0, raising=False)
    arguments.set_engine_arguments(config, launch)
    assert (arguments.RETENTION in config) == keep
    assert config.get(arguments.RETENTION) is None
    chosen = {arguments.RETENTION: 64}
    arguments.set_engine_arguments(chosen, launch)
    assert chosen[arguments.RETENTION] == 64
