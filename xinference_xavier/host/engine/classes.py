"""Xinference's vLLM models with the snapshot cache.

Covers: taking our options out of a launch, checking them, and setting vLLM's arguments. Does not
cover: anything of a launch without our switch, which runs the host's code alone. An instance is
made in the worker process, pickled, and loads in its model process. A module of its own: see the
package's docstring.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from xinference.model.llm.vllm.core import VLLMChatModel, VLLMModel, VLLMMultiModel

from xinference_xavier.config import XavierOptions
from xinference_xavier.host.engine import arguments
from xinference_xavier.host.engine.announce import StartingNotice
from xinference_xavier.host.identity import Identity, count_local_replicas
from xinference_xavier.types import OptionError

logger = logging.getLogger(__name__)


class SnapshotCacheMixin:
    """Goes before one of the host's vLLM classes.

    ``_xavier`` holds the options as plain data, since a model's own virtual environment may
    have another pydantic than the worker that pickles the instance.
    """

    model_uid: str
    rep_id: int
    _loop: asyncio.AbstractEventLoop | None
    _xavier: dict[str, Any] | None = None
    _identity: Identity | None = None
    _local_replicas: int = 1
    _notice: StartingNotice | None = None

    def __init__(
        self,
        model_uid: str,
        model_family: Any,
        model_path: str,
        model_config: Any,
        peft_model: Any = None,
    ) -> None:
        options, others = _split(model_config)
        super().__init__(model_uid, model_family, model_path, others, peft_model)  # type: ignore
        self._xavier = None if options is None else options.model_dump(mode="json")

    def set_identity(self, identity: Identity) -> None:
        """Called in the model process before ``load``."""
        self._identity = identity

    def load(self) -> None:
        if self._xavier is None:
            super().load()  # type: ignore[misc]
            return
        arguments.ensure_hash_seed()
        self._local_replicas = self._on_loop(count_local_replicas(self._who()))
        self._notice = StartingNotice(self._who(), self._xavier, self._loop)
        self._notice.start()
        try:
            super().load()  # type: ignore[misc]
        except BaseException:
            self._notice.stop()
            raise

    def wait_for_load(self) -> None:
        try:
            super().wait_for_load()  # type: ignore[misc]
        finally:
            if self._notice is not None:
                self._notice.stop()

    def _sanitize_model_config(self, model_config: Any) -> Any:
        sanitized = super()._sanitize_model_config(model_config)  # type: ignore[misc]
        if self._xavier is None:
            return sanitized
        options = XavierOptions(**self._xavier)
        arguments.set_single_rank_on_cpu(sanitized)
        arguments.set_engine_arguments(sanitized, options, self._who(), self._local_replicas)
        logger.info("%s keeps snapshots: %s", self.model_uid, arguments.describe(sanitized))
        return sanitized

    def _who(self) -> Identity:
        return self._identity or Identity(self.model_uid, max(self.rep_id, 0))

    def _on_loop(self, question: Any) -> Any:
        """Run a coroutine on the model actor's event loop, from the loading thread."""
        if self._loop is None:
            return asyncio.run(question)
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()


def _split(model_config: Any) -> tuple[XavierOptions | None, Any]:
    """Our options and the host's arguments; the latter unchanged where none of ours is in them.

    Raises:
        ValueError: the sentence of an ``OptionError``, in a class that every host can unpickle.
    """
    try:
        options, others = XavierOptions.from_launch(model_config or {})
    except OptionError as error:
        raise ValueError(str(error)) from None
    return options, model_config if len(others) == len(model_config or {}) else others


class XavierVLLMModel(SnapshotCacheMixin, VLLMModel):  # type: ignore[misc]
    """Completion models."""


class XavierVLLMChatModel(SnapshotCacheMixin, VLLMChatModel):  # type: ignore[misc]
    """Chat models."""


class XavierVLLMMultiModel(SnapshotCacheMixin, VLLMMultiModel):  # type: ignore[misc]
    """Models that see and hear."""


#: Host class -> ours. The names keep "Chat" and "Multi", by which the host picks a class for a
#: model with its own virtual environment.
REPLACEMENTS: dict[type, type] = {
    VLLMModel: XavierVLLMModel,
    VLLMChatModel: XavierVLLMChatModel,
    VLLMMultiModel: XavierVLLMMultiModel,
}
