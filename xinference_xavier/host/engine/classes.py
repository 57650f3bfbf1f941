"""Xinference's vLLM models with the snapshot cache.

Covers: taking our options out of a launch, checking them, and setting vLLM's arguments. Does not
cover: anything of a launch without our switch, which runs the host's code alone. An instance is
made in the worker process, pickled, and loads in its model process. A module of its own: see the
package's docstring.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from xinference.model.llm.vllm.core import VLLMChatModel, VLLMModel, VLLMMultiModel

from xinference_xavier import budgets
from xinference_xavier.config import XavierOptions
from xinference_xavier.engine.content import adapter_digests
from xinference_xavier.engine.last_words import LastWords
from xinference_xavier.engine.settings import pass_secret
from xinference_xavier.host.engine import arguments
from xinference_xavier.host.engine.announce import StartingNotice
from xinference_xavier.host.engine.register import ENGINE
from xinference_xavier.host.engine.tokens import prompt_tokens
from xinference_xavier.host.engine.usage import ReceiptsMixin
from xinference_xavier.host.identity import (
    Identity,
    cluster_secret,
    count_local_replicas,
    sharing_problem,
)
from xinference_xavier.host.options import check_payload, vllm_problem
from xinference_xavier.types import OptionError

logger = logging.getLogger(__name__)


class SnapshotCacheMixin(ReceiptsMixin):
    """Goes before one of the host's vLLM classes.

    ``_xavier`` holds the options as plain data, since a model's own virtual environment may
    have another pydantic than the worker that pickles the instance.
    """

    model_uid: str
    rep_id: int
    lora_modules: list[Any] | None
    _loop: asyncio.AbstractEventLoop | None
    _xavier: dict[str, Any] | None = None
    _identity: Identity | None = None
    _local_replicas: int = 1
    _share_problem: str | None = None
    _adapters: Mapping[str, str] = MappingProxyType({})
    _notice: StartingNotice | None = None
    _words: LastWords | None = None

    def __init__(
        self,
        model_uid: str,
        model_family: Any,
        model_path: str,
        model_config: Any,
        peft_model: Any = None,
    ) -> None:
        options, others = _take_options(model_config)
        super().__init__(model_uid, model_family, model_path, others, peft_model)  # type: ignore
        self._xavier = options

    def set_identity(self, identity: Identity) -> None:
        """Called in the model process before ``load``."""
        self._identity = identity

    def load(self) -> None:
        if self._xavier is None:
            super().load()  # type: ignore[misc]
            return
        self._check_vllm()
        self.prepare_receipts()
        self._prepare_sharing(XavierOptions(**self._xavier))
        self._local_replicas = self._on_loop(count_local_replicas(self._who()))
        self._notice = StartingNotice(self._who(), self._xavier, self._loop)
        self._notice.start()
        self._words = LastWords()
        with self._explaining():
            super().load()  # type: ignore[misc]

    def _prepare_sharing(self, options: XavierOptions) -> None:
        """What this replica must have in common with others, and why it shares with none."""
        secret = self._on_loop(cluster_secret(self._who()))
        pass_secret(secret)
        arguments.ensure_hash_seed(secret)
        self._share_problem = sharing_problem(options.xavier_share, self._who(), secret)
        adapters = [(lora.lora_name, lora.local_path) for lora in self.lora_modules or []]
        self._adapters = adapter_digests(adapters)

    def wait_for_load(self) -> None:
        with self._explaining():
            super().wait_for_load()  # type: ignore[misc]
        self._close_start()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """A failure of the body ends the start, with the failing rank's own sentence if any."""
        try:
            yield
        except BaseException as error:
            words = self._words.read() if self._words is not None else ""
            self._close_start()
            if words:
                raise ValueError(words) from error
            raise

    async def xavier_prompt_tokens(self, prompt: Any) -> list[int]:
        """Token ids of a text, or of chat messages, as the engine gets them; by the model actor.

        Raises:
            ValueError: the model does not take such a prompt.
        """
        return await prompt_tokens(self, prompt)

    def _close_start(self) -> None:
        if self._notice is not None:
            self._notice.stop()
        if self._words is not None:
            self._words.close()

    def _sanitize_model_config(self, model_config: Any) -> Any:
        chosen_share = (model_config or {}).get("gpu_memory_utilization") is not None
        sanitized = super()._sanitize_model_config(model_config)  # type: ignore[misc]
        if self._xavier is None:
            return sanitized
        options = XavierOptions(**self._xavier)
        arguments.set_single_rank_on_cpu(sanitized)
        with _as_value_error():
            arguments.reserve_on_device(sanitized, options, chosen_share)
        settings = replace(
            arguments.settings_of(options, self._who()),
            local_replicas=self._local_replicas,
            last_words=None if self._words is None else str(self._words.path),
            adapters=dict(self._adapters),
            share_problem=self._share_problem,
        )
        arguments.set_engine_arguments(sanitized, settings)
        logger.info("%s keeps snapshots: %s", self.model_uid, arguments.describe(sanitized))
        return sanitized

    def _check_vllm(self) -> None:
        """Refuse a vLLM outside the supported range; a model's own environment has its own."""
        import vllm

        problem = vllm_problem(vllm.__version__)
        if problem is not None:
            raise ValueError(problem)

    def _who(self) -> Identity:
        return self._identity or Identity(self.model_uid, max(self.rep_id, 0))

    def _on_loop(self, question: Any) -> Any:
        """Run a coroutine on the model actor's event loop, from the loading thread."""
        if self._loop is None:
            return asyncio.run(question)
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Give the sentence of an ``OptionError`` to the host in a class that every host unpickles."""
    try:
        yield
    except OptionError as error:
        raise ValueError(str(error)) from None


def _take_options(model_config: Any) -> tuple[dict[str, Any] | None, Any]:
    """Our options as plain data, and the host's arguments.

    The API has checked launches that came by it; autostarts and actor clients come here only.
    Without an option of ours the host gets the very object it made.
    """
    launch = model_config or {}
    with _as_value_error():
        options, _ = check_payload({"model_engine": ENGINE, **launch})
        _, others = XavierOptions.from_launch(launch)
        if options is not None:
            _check_locked_memory(options)
    plain = None if options is None else options.model_dump(mode="json")
    return plain, model_config if len(others) == len(launch) else others


def _check_locked_memory(options: XavierOptions) -> None:
    """This is the worker's machine, whose limit counts; the API may run on another."""
    if options.xavier_cpu_budget == "auto":
        return
    problem = budgets.memlock_problem(options.xavier_cpu_budget, budgets.locked_memory_limit())
    if problem is not None:
        raise OptionError(problem)


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
