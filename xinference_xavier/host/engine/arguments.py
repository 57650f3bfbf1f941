"""Launch options as vLLM engine arguments.

Covers: what is set for the connector, prefix caching and the block hash; the hash seed of the
process. Does not cover: checking the options (``host/options.py``) or their room on the device
(``host/sizing.py``). Runs in the model process, in the thread that loads the model.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import MutableMapping
from typing import Any

from xinference_xavier.config import XavierOptions
from xinference_xavier.host.identity import Identity

logger = logging.getLogger(__name__)

SEED_VARIABLE = "PYTHONHASHSEED"

#: vLLM reads the seed as text, but the interpreters it starts accept 32 bits only.
_SEEDS = 2**32

DEFAULT_HASH = "sha256_cbor"


def set_engine_arguments(
    model_config: MutableMapping[str, Any],
    options: XavierOptions,
    identity: Identity,
    local_replicas: int,
) -> None:
    """Make ``model_config``, the arguments of vLLM's engine, use the snapshot cache."""
    model_config["kv_transfer_config"] = transfer_config(options, identity, local_replicas)
    model_config["enable_prefix_caching"] = True
    model_config.setdefault("prefix_caching_hash_algo", DEFAULT_HASH)


def transfer_config(
    options: XavierOptions, identity: Identity, local_replicas: int
) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for one replica, plain data only."""
    ours = {
        **options.model_dump(mode="json"),
        "model_uid": identity.model_uid,
        "replica": identity.replica,
        "tracker_address": identity.supervisor_address,
        "listen_host": identity.listen_host,
        "local_replicas": local_replicas,
    }
    return {
        "kv_connector": "XavierGpuConnector",
        "kv_connector_module_path": "xinference_xavier.engine.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "XavierSpec",
            "spec_module_path": "xinference_xavier.engine.spec",
            "offload_prompt_only": not options.xavier_store_decode,
            "xavier": ours,
        },
    }


def set_single_rank_on_cpu(model_config: MutableMapping[str, Any]) -> None:
    """Turn the host's tensor parallel size of 0, its count of GPUs, into 1 on a CPU build."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and model_config.get("tensor_parallel_size") == 0:
        model_config["tensor_parallel_size"] = 1


def ensure_hash_seed() -> None:
    """Give this process and its children one seed for block hashes.

    vLLM derives every key from it. A random one keeps keys from being guessed; one from the
    user's environment is kept, as other replicas may have been given the same.
    """
    if os.environ.get(SEED_VARIABLE, "random") != "random":
        logger.info("Block hashes use the %s of this environment", SEED_VARIABLE)
        return
    os.environ[SEED_VARIABLE] = str(secrets.randbelow(_SEEDS))


def describe(model_config: MutableMapping[str, Any]) -> str:
    """The connector's arguments on one line, for the log."""
    extra = model_config["kv_transfer_config"]["kv_connector_extra_config"]
    return json.dumps(extra["xavier"], sort_keys=True)
