"""What the launch decided, as it reaches an engine: one dictionary in the connector's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from xinference_xavier.config import XavierOptions

#: Key of our dictionary in ``kv_connector_extra_config``.
EXTRA_KEY = "xavier"


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
    """

    options: XavierOptions
    model_uid: str = ""
    replica: int = 0
    tracker_address: str | None = None
    listen_host: str = "127.0.0.1"
    local_replicas: int = 1
    last_words: str | None = None

    def transfer_config(self) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config`` for this replica, plain data only."""
        others = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "options"
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
