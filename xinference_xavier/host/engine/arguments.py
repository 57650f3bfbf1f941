"""Launch options as vLLM engine arguments.

Covers: what is set for the connector, prefix caching and the block hash; the hash seed of the
process. Does not cover: checking the options (``host/options.py``) or their room on the device
(``host/sizing.py``). Runs in the model process, in the thread that loads the model.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import os
import secrets
from collections.abc import MutableMapping
from typing import Any

from xinference_xavier.config import HASH_ALGORITHM, XavierOptions
from xinference_xavier.engine.settings import EngineSettings
from xinference_xavier.host import sizing
from xinference_xavier.host.identity import Identity
from xinference_xavier.types import OptionError

logger = logging.getLogger(__name__)

SEED_VARIABLE = "PYTHONHASHSEED"

#: vLLM's argument for how often it keeps a sliding window's blocks; None keeps every one.
RETENTION = "prefix_cache_retention_interval"

#: Share of a device left for what vLLM allocates outside its own share, such as CUDA graphs.
DEVICE_MARGIN = 0.02

#: vLLM reads the seed as text, but the interpreters it starts accept 32 bits only.
_SEEDS = 2**32


def set_engine_arguments(model_config: MutableMapping[str, Any], settings: EngineSettings) -> None:
    """Make ``model_config``, the arguments of vLLM's engine, use the snapshot cache."""
    model_config["kv_transfer_config"] = settings.transfer_config()
    model_config["enable_prefix_caching"] = True
    model_config["prefix_caching_hash_algo"] = HASH_ALGORITHM
    if settings.options.xavier_store_decode:
        keep_windows(model_config)


def keep_windows(model_config: MutableMapping[str, Any]) -> None:
    """Where vLLM asks for it (later than 0.27), keep a sliding window's blocks while decoding.

    By default such a vLLM keeps them at the end of the prompt only, and the next turn of a chat
    would find no window behind the answer. A choice of the user's stays.
    """
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs, RETENTION):
        model_config.setdefault(RETENTION, None)


def settings_of(options: XavierOptions, identity: Identity) -> EngineSettings:
    """What an engine is told of its launch and its replica; the rest is found out while loading."""
    return EngineSettings(
        options=options,
        model_uid=identity.model_uid,
        replica=identity.replica,
        tracker_address=identity.supervisor_address,
        listen_host=identity.listen_host,
    )


def set_single_rank_on_cpu(model_config: MutableMapping[str, Any]) -> None:
    """Turn the host's tensor parallel size of 0, its count of GPUs, into 1 on a CPU build."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and model_config.get("tensor_parallel_size") == 0:
        model_config["tensor_parallel_size"] = 1


def reserve_on_device(
    model_config: MutableMapping[str, Any], options: XavierOptions, explicit: bool
) -> None:
    """Leave room for the GPU budget beside vLLM's share of each device.

    ``explicit`` says that the user chose ``gpu_memory_utilization``, which is then never changed.
    Nothing to do where the KV cache lies in RAM.

    Raises:
        OptionError: the budget does not fit; the sentence says what would.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        total_bytes = current_platform.get_device_total_memory(0)
        fit_device(model_config, options.xavier_gpu_budget, total_bytes, explicit)


def fit_device(
    model_config: MutableMapping[str, Any], budget_bytes: int, total_bytes: int, explicit: bool
) -> None:
    """The arithmetic of ``reserve_on_device`` for devices of ``total_bytes`` each."""
    ranks = int(model_config["tensor_parallel_size"]) * int(model_config["pipeline_parallel_size"])
    share = float(model_config["gpu_memory_utilization"])
    problem = sizing.device_budget_problem(budget_bytes, total_bytes, share, ranks)
    if problem is None:
        return
    beside = 1 - math.ceil(budget_bytes / ranks) / total_bytes - DEVICE_MARGIN
    if explicit or beside <= 0:
        raise OptionError(problem)
    model_config["gpu_memory_utilization"] = math.floor(beside * 1000) / 1000
    logger.info(
        "gpu_memory_utilization is %.3f instead of %.3f, to leave room for xavier_gpu_budget=%d",
        model_config["gpu_memory_utilization"],
        share,
        budget_bytes,
    )


def ensure_hash_seed(secret: bytes | None) -> None:
    """Give this process and its children one seed for block hashes.

    vLLM derives every key from it. It follows from the cluster's secret, so that all replicas have
    the same keys and nobody else can guess them; without a secret it is random. One from the
    user's environment is kept.
    """
    if os.environ.get(SEED_VARIABLE, "random") != "random":
        logger.info("Block hashes use the %s of this environment", SEED_VARIABLE)
        return
    if secret is None:
        seed = secrets.randbelow(_SEEDS)
    else:
        mac = hmac.new(secret, b"block hash seed", hashlib.sha256).digest()
        seed = int.from_bytes(mac[:4], "big")
    os.environ[SEED_VARIABLE] = str(seed)


def describe(model_config: MutableMapping[str, Any]) -> str:
    """The connector's arguments on one line, for the log. There is no secret among them."""
    extra = model_config["kv_transfer_config"]["kv_connector_extra_config"]
    return json.dumps(extra["xavier"], sort_keys=True)
