"""What the panel lets a person do to a cache, and the sentences that tell the outcome.

Covers: asking whether the person may, calling ``host/admin.py``, wording answers and refusals.
Does not cover buttons and confirmation (``steering.py``). Runs on the event loop of Xinference's
API process.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from xinference_xavier.host.admin import Admin
from xinference_xavier.types import XavierError

from .access import NEEDS_WRITE, Access
from .units import bytes_text, count_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Sentences to show; ``bad`` when nothing, or not everything, was done."""

    sentences: list[str]
    bad: bool = False


class Actions:
    """One per API process. No method raises: what goes wrong is an ``Outcome``."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def why_not(self, access: Access | None) -> str:
        """Why this person cannot change anything; empty when they can."""
        allowed = access is not None and await access.may_change()
        return "" if allowed else NEEDS_WRITE

    async def clear(self, access: Access | None, model_uid: str) -> Outcome:
        return await self._do(
            access, f"clear {model_uid}", lambda admin: admin.clear(model_uid), _cleared
        )

    async def resize(
        self, access: Access | None, model_uid: str, gpu: str | None, cpu: str | None
    ) -> Outcome:
        """Budgets as typed; an empty one stays as it is."""
        budgets = (_typed(gpu), _typed(cpu))
        what = f"resize {model_uid} to {budgets}"
        return await self._do(
            access, what, lambda admin: admin.resize(model_uid, *budgets), _resized
        )

    async def pause(self, access: Access | None, model_uid: str, paused: bool) -> Outcome:
        what = f"{'pause' if paused else 'resume'} stores of {model_uid}"
        return await self._do(
            access, what, lambda admin: admin.pause_stores(model_uid, paused), _paused
        )

    async def lookup(self, access: Access | None, model_uid: str, prompt: str) -> Outcome:
        """Needs the scope to change: the answer tells what others have asked."""
        what = f"look up a prompt of {model_uid}"
        return await self._do(access, what, lambda admin: admin.lookup(model_uid, prompt), _found)

    async def _do(
        self,
        access: Access | None,
        what: str,
        call: Callable[[Admin], Awaitable[Any]],
        tell: Callable[[Any], Iterable[str]],
    ) -> Outcome:
        refused = await self.why_not(access)
        if refused or access is None:
            return Outcome([refused], bad=True)
        logger.info("%s asked from the panel to %s", access.user, what)
        try:
            answer = await call(self._admin)
        except (XavierError, LookupError) as error:
            text = error.args[0] if error.args else type(error).__name__
            return Outcome([str(text)], bad=True)
        except Exception as error:
            logger.warning("Failed from the panel to %s", what, exc_info=True)
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            return Outcome([f"It failed ({reason}). The server's log says more."], bad=True)
        problems = [replica.problem for replica in answer.replicas if replica.problem]
        return Outcome([*problems, *tell(answer)], bad=bool(problems))


def _typed(text: str | None) -> int | str | None:
    """A budget as typed: None when empty, a number of bytes when it is only digits."""
    text = (text or "").strip()
    if not text:
        return None
    return int(text) if text.isascii() and text.isdigit() else text


def _cleared(answer: Any) -> Iterable[str]:
    for replica in _answered(answer):
        later = replica.removed_later
        rest = f"; {count_text(later)} are in use and go when released" if later else ""
        count = count_text(replica.removed_now + later)
        yield f"Replica {replica.replica}: {count} snapshots forgotten{rest}."


def _resized(answer: Any) -> Iterable[str]:
    for replica in _answered(answer):
        tiers = [("GPU", replica.gpu), ("CPU", replica.cpu)]
        said = [_tier(name, tier) for name, tier in tiers if tier is not None]
        yield f"Replica {replica.replica}: {', '.join(said)}."


def _tier(name: str, tier: Any) -> str:
    text = f"{name} {bytes_text(tier.budget_bytes)} in {count_text(tier.rows)} rows"
    if tier.state != "done":
        text += f", still {tier.state} ({count_text(tier.rows_leaving)} rows leave)"
    return f"{text} ({tier.note.rstrip('.')})" if tier.note else text


def _paused(answer: Any) -> Iterable[str]:
    for replica in _answered(answer):
        state = "stores no new blocks" if replica.paused else "stores new blocks"
        yield f"Replica {replica.replica} {state}."


def _found(answer: Any) -> Iterable[str]:
    yield f"The prompt has {count_text(answer.tokens)} tokens."
    for replica in _answered(answer):
        places = (
            ("the engine's own cache", replica.engine),
            ("GPU snapshots", replica.gpu),
            ("CPU snapshots", replica.cpu),
            ("a peer", replica.peer),
            ("not cached", replica.not_cached),
        )
        said = ", ".join(f"{name} {count_text(count)}" for name, count in places if count)
        yield (
            f"Replica {replica.replica}: {said or 'nothing'}; {count_text(replica.prefix)} from "
            "its start need not be computed."
        )


def _answered(answer: Any) -> list[Any]:
    return [replica for replica in answer.replicas if not replica.problem]
