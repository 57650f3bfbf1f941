"""What the launch decided, as it reaches an engine: one dictionary in the connector's config.

The cluster's secret goes beside it, through the environment: vLLM and Xinference log the
dictionary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from xinference_xavier.config import XavierOptions

#: Key of our dictionary in ``kv_connector_extra_config``.
EXTRA_KEY = "xavier"

#: Environment variable of a model process and its children: the cluster's secret in hex.
SECRET_VARIABLE = "XINFERENCE_XAVIER_SECRET"


def cluster_secret() -> bytes | None:
    """The secret all replicas of this cluster share, or None without one. Never to be logged.

    Raises:
        ValueError: the variable does not hold hex digits.
    """
    digits = os.environ.get(SECRET_VARIABLE)
    return bytes.fromhex(digits) if digits else None


def pass_secret(secret: bytes | None) -> None:
    """Give ``cluster_secret`` of this process and of those it starts its answer."""
    if secret is None:
        os.environ.pop(SECRET_VARIABLE, None)
    else:
        os.environ[SECRET_VARIABLE] = secret.hex()


@dataclass(frozen=True)
class EngineSettings:
    """Options and identity of one replica.

    Attributes:
        options: the validated launch options.
        model_uid, replica: who this replica is to Xinference.
        tracker_address: xoscar address of the supervisor; None runs without a cluster.
        listen_host: the interface other processes reach this replica on.
        local_replicas: replicas that share this machine's memory.
        last_words: file for the reason why the engine does not start.
        adapters: digest of each LoRA adapter's content, by its name.
        share_problem: the sentence why this replica shares with nobody; None lets it share.
    """

    options: XavierOptions
    model_uid: str = ""
    replica: int = 0
    tracker_address: str | None = None
    listen_host: str = "127.0.0.1"
    local_replicas: int = 1
    last_words: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    share_problem: str | None = None

    @property
    def unshared(self) -> str | None:
        """The sentence why this replica shares with nobody; None if it may."""
        if self.share_problem is None and self.tracker_address is None:
            return "This replica runs without a cluster"
        return self.share_problem

    def transfer_config(self) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config`` for this replica, plain data only."""
        others = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "options"
        }
        return {
            "kv_connector": "XavierGpuConnector",
            "kv_connector_module_path": "xinference_xavier.engine.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "XavierSpec",
                "spec_module_path": "xinference_xavier.engine.spec",
                "offload_prompt_only": not self.options.xavier_store_decode,
                EXTRA_KEY: {**self.options.model_dump(mode="json"), **others},
            },
        }

    @classmethod
    def from_extra(cls, extra_config: Mapping[str, Any]) -> EngineSettings:
        """Read our part of ``kv_connector_extra_config``.

        Raises:
            pydantic.ValidationError: it did not come from ``XavierOptions``.
        """
        data = dict(extra_config.get(EXTRA_KEY) or {})
        options = {name: data.pop(name) for name in XavierOptions.model_fields if name in data}
        return cls(options=XavierOptions.model_validate(options), **data)
