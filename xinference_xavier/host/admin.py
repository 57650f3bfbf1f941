"""Steering a running cache: clear, budgets, where a prompt lies, pausing stores.

Covers: finding a model's replicas, asking all of them, and one answer for the model. Does not
cover routes (``admin_routes.py``) or what a replica does (``engine/steering.py``). Runs on the
event loop of Xinference's API process; every call has a time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import xoscar as xo
from pydantic import BaseModel, ConfigDict

from xinference_xavier.actors.reach import reach
from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.config import SWITCH, parse_size, refusal
from xinference_xavier.types import OptionError, XavierError

logger = logging.getLogger(__name__)

#: How long a replica may take to answer: a command waits up to 20 s for a step, and a change of
#: budgets ``RESIZE_SECONDS`` more.
CALL_SECONDS = 45.0
#: How long a change of budgets may take until the answer says that it is still under way.
RESIZE_SECONDS = 10.0

#: A prompt, or the messages of a chat.
Prompt = str | Sequence[Mapping[str, Any]]


class AdminError(XavierError):
    """What was asked for cannot be done now; the message says why and what to do."""


class ReplicaAnswer(BaseModel):
    """What one replica answered. ``problem`` is a sentence when it did not, or could not; then
    every other field is None."""

    model_config = ConfigDict(extra="forbid")

    replica: int
    problem: str | None = None


class ReplicaCleared(ReplicaAnswer):
    """Snapshots forgotten by a clear; none of them is found any more."""

    #: Their rows are free at once.
    removed_now: int | None = None
    #: Their rows are free when the copies and peers that use them have ended.
    removed_later: int | None = None


class ClearedView(BaseModel):
    """Answer of ``clear``."""

    model_uid: str
    replicas: list[ReplicaCleared]


class TierBudget(BaseModel):
    """One tier's size. ``budget_bytes`` is what was asked for, over all ranks."""

    budget_bytes: int
    rows: int
    #: Rows beyond the new budget that are still in use.
    rows_leaving: int = 0
    #: ``done``, or what is waited for: ``draining`` (rows still in use), ``ranks`` (memory).
    state: str = "done"
    #: What an operator should know, such as memory that stays reserved; else None.
    note: str | None = None


class ReplicaResized(ReplicaAnswer):
    """One replica's tiers now."""

    gpu: TierBudget | None = None
    cpu: TierBudget | None = None


class ResizedView(BaseModel):
    """Answer of ``resize``."""

    model_uid: str
    replicas: list[ReplicaResized]


class ReplicaFound(ReplicaAnswer):
    """Where a prompt's tokens are, for one replica. The counts add up to the prompt's tokens;
    each block counts where the engine would take it from."""

    #: Found in vLLM's own prefix cache, the GPU tier, the CPU tier, a peer, and nowhere.
    engine: int | None = None
    gpu: int | None = None
    cpu: int | None = None
    peer: int | None = None
    not_cached: int | None = None
    #: Tokens from the start without a gap that need not be computed, peers counted.
    prefix: int | None = None


class LookupView(BaseModel):
    """Answer of ``lookup``."""

    model_uid: str
    #: Tokens of the prompt, after the chat template.
    tokens: int
    replicas: list[ReplicaFound]


class ReplicaPaused(ReplicaAnswer):
    """Whether a replica stores new blocks."""

    paused: bool | None = None


class PausedView(BaseModel):
    """Answer of ``pause_stores``."""

    model_uid: str
    replicas: list[ReplicaPaused]


Answer = TypeVar("Answer", bound=ReplicaAnswer)
#: One replica of a model: its number and where it listens (None while it starts).
Place = tuple[int, str | None]


class Admin:
    """Steers the replicas of every model. One per API process, on its event loop.

    Args:
        places: the replicas of a model that the tracker knows; raises when the supervisor does
            not answer.
        known_models: uid of each model that the supervisor knows.
        tokenize: token ids of a prompt or of chat messages, as the model's engine sees them;
            raises ``ValueError`` for what the model does not take.

    Every method raises ``LookupError`` for a uid that no model has, ``AdminError`` for a model
    without a running replica that keeps a cache, and what the connection to the supervisor raises.
    """

    def __init__(
        self,
        places: Callable[[str], Awaitable[list[Place]]],
        known_models: Callable[[], Awaitable[Mapping[str, Any]]],
        tokenize: Callable[[str, Prompt], Awaitable[list[int]]],
    ) -> None:
        self._places = places
        self._known_models = known_models
        self._tokenize = tokenize

    async def clear(self, model_uid: str) -> ClearedView:
        """Forget every snapshot of every replica. vLLM's own prefix cache is not touched, and
        rows that are being read are free when that has ended."""
        answers = await self._ask(model_uid, ReplicaCleared, lambda ref: ref.clear())
        return ClearedView(model_uid=model_uid, replicas=answers)

    async def resize(
        self,
        model_uid: str,
        gpu_budget: int | str | None = None,
        cpu_budget: int | str | None = None,
    ) -> ResizedView:
        """Change the budgets of every replica; None leaves one as it is.

        Returns when it is done, or after ``RESIZE_SECONDS`` with what is still waited for; it goes
        on by itself. A replica that refuses says why in ``problem`` and keeps its budgets.

        Raises:
            OptionError: a value that is no size, no value at all, or no tier left.
        """
        gpu, cpu = check_budgets(gpu_budget, cpu_budget)
        answers = await self._ask(
            model_uid, ReplicaResized, lambda ref: ref.resize(gpu, cpu, RESIZE_SECONDS)
        )
        return ResizedView(model_uid=model_uid, replicas=answers)

    async def lookup(
        self, model_uid: str, prompt: Prompt, cache_salt: str | None = None
    ) -> LookupView:
        """Where the blocks of a prompt (text) or of chat messages lie, for each replica. Counts as
        no use, and changes nothing. ``cache_salt``: that of the request, if it has one.

        Raises:
            OptionError: an empty prompt, or messages that the model's chat template refuses.
        """
        if not prompt:
            raise refusal("prompt", prompt, "is empty", "Give a text or the messages of a chat.")
        await self._running(model_uid)
        try:
            tokens = await self._tokenize(model_uid, prompt)
        except ValueError as error:
            remedy = "Give what the model takes: a text, or messages with role and content."
            raise refusal("prompt", prompt, f"is not understood ({error})", remedy) from error
        answers = await self._ask(
            model_uid, ReplicaFound, lambda ref: ref.lookup(tokens, cache_salt)
        )
        return LookupView(model_uid=model_uid, tokens=len(tokens), replicas=answers)

    async def pause_stores(self, model_uid: str, paused: bool) -> PausedView:
        """Let every replica store no new blocks, or again. What is stored stays and is used."""
        answers = await self._ask(model_uid, ReplicaPaused, lambda ref: ref.pause_stores(paused))
        return PausedView(model_uid=model_uid, replicas=answers)

    async def _running(self, model_uid: str) -> list[Place]:
        places = await self._places(model_uid)
        if any(address is not None for _, address in places):
            return places
        if not places and model_uid not in await self._known_models():
            raise LookupError(f"There is no model {model_uid!r}. GET /v1/models lists the running.")
        raise AdminError(
            f"No replica of {model_uid!r} is running with a snapshot cache. Launch it with "
            f"{SWITCH}=true, or wait until it has started."
        )

    async def _ask(
        self, model_uid: str, kind: type[Answer], call: Callable[[Any], Awaitable[dict[str, Any]]]
    ) -> list[Answer]:
        """Every replica's answer, in the order of their numbers; they answer in parallel."""
        places = await self._running(model_uid)
        return list(await asyncio.gather(*(self._one(place, kind, call) for place in places)))

    async def _one(
        self, place: Place, kind: type[Answer], call: Callable[[Any], Awaitable[dict[str, Any]]]
    ) -> Answer:
        number, address = place
        if address is None:
            return kind(replica=number, problem=f"Replica {number} is still starting. Try again.")

        async def ask() -> dict[str, Any]:
            return await call(await reach(REPLICA_UID, address))

        try:
            return kind(replica=number, **await xo.wait_for(ask(), CALL_SECONDS))
        except OptionError as error:
            return kind(replica=number, problem=str(error))
        except Exception as error:
            logger.warning("Replica %d at %s did not answer", number, address, exc_info=True)
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            return kind(
                replica=number,
                problem=f"Replica {number} did not answer ({reason}). Whether it did what was "
                "asked is not known; look at its statistics, and try again.",
            )


def check_budgets(
    gpu_budget: int | str | None, cpu_budget: int | str | None
) -> tuple[int | None, int | None]:
    """Both in bytes, None where unchanged: the rules of a launch, as far as they need no engine.

    Raises:
        OptionError: a value that is no size, no value at all, or no tier left.
    """
    gpu = None if gpu_budget is None else parse_size(gpu_budget, "xavier_gpu_budget")
    cpu = None if cpu_budget is None else parse_size(cpu_budget, "xavier_cpu_budget")
    if gpu is None and cpu is None:
        raise OptionError(
            "Neither xavier_gpu_budget nor xavier_cpu_budget is given. Give at least one a size, "
            "such as 4GiB."
        )
    if gpu == 0 and cpu == 0:
        raise OptionError(
            "xavier_gpu_budget=0 and xavier_cpu_budget=0 leave no tier to keep snapshots in. Give "
            "one of them a size. To keep nothing for a while, pause stores and clear."
        )
    return gpu, cpu


def tokenizer_of(api: Any) -> Callable[[str, Prompt], Awaitable[list[int]]]:
    """Asks one replica's model process, by the API's supervisor."""

    async def tokenize(model_uid: str, prompt: Prompt) -> list[int]:
        supervisor = await api._get_supervisor_ref()
        model = await supervisor.get_model(model_uid)
        asked = model.xavier_prompt_tokens(prompt)
        tokens: list[int] = await xo.wait_for(asked, CALL_SECONDS)
        return tokens

    return tokenize
