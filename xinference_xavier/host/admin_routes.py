"""The routes that steer a cache: their bodies, scopes and status codes.

Covers: HTTP. Does not cover what is done (``admin.py``). Runs on the event loop of Xinference's
API process. Who may ask is up to the host's authentication: changing needs the scope to launch, and
so does a lookup, since it tells what others have asked.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from xinference_xavier.host.admin import (
    Admin,
    AdminError,
    ClearedView,
    LookupView,
    PausedView,
    ResizedView,
)
from xinference_xavier.types import OptionError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=BaseModel)
Body = TypeVar("Body", bound=BaseModel)

#: Values are quoted in errors; a body may hold anything.
_SHORT = reprlib.Repr()


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Budgets(_Body):
    """Bytes, or text such as 4GiB; what is left out stays as it is."""

    xavier_gpu_budget: Any = None
    xavier_cpu_budget: Any = None


class Wanted(_Body):
    """A prompt of ``/v1/completions`` or the messages of ``/v1/chat/completions``, one of both."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = Field(default=None, min_length=1)


class Stores(_Body):
    """Whether new blocks are stored."""

    paused: StrictBool


def add_admin_routes(router: Any, admin: Admin, dependencies: Callable[[], list[Any]]) -> None:
    """Add the routes to the host's router; ``dependencies`` makes those that authenticate."""

    async def clear(model_uid: str) -> JSONResponse:
        """Forget every snapshot of every replica; rows in use are freed when released."""
        return await _answer(admin.clear(model_uid))

    async def resize(model_uid: str, request: Request) -> JSONResponse:
        """Change the budgets of every replica while it runs."""
        body = await _body(request, Budgets)
        given = (body.xavier_gpu_budget, body.xavier_cpu_budget)
        return await _answer(admin.resize(model_uid, *given))

    async def lookup(model_uid: str, request: Request) -> JSONResponse:
        """How many tokens of a prompt are cached, and where."""
        body = await _body(request, Wanted)
        if (body.prompt is None) == (body.messages is None):
            detail = "Give either prompt, a text, or messages, those of a chat."
            raise HTTPException(status_code=400, detail=detail)
        prompt = body.messages if body.prompt is None else body.prompt
        return await _answer(admin.lookup(model_uid, prompt or "", body.cache_salt))

    async def stores(model_uid: str, request: Request) -> JSONResponse:
        """Pause storing new blocks, or go on."""
        body = await _body(request, Stores)
        return await _answer(admin.pause_stores(model_uid, body.paused))

    for method, path, endpoint, model, body in (
        ("POST", "clear", clear, ClearedView, None),
        ("PATCH", "budgets", resize, ResizedView, Budgets),
        ("POST", "lookup", lookup, LookupView, Wanted),
        ("POST", "stores", stores, PausedView, Stores),
    ):
        router.add_api_route(
            f"/v1/xavier/{{model_uid}}/{path}",
            endpoint,
            methods=[method],
            response_model=model,
            dependencies=dependencies(),
            openapi_extra=_described(body),
        )


def _described(body: type[BaseModel] | None) -> dict[str, Any] | None:
    """A request's body for the OpenAPI document."""
    if body is None:
        return None
    content = {"application/json": {"schema": body.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def _body(request: Request, kind: type[Body]) -> Body:
    """A request's body. Read here, behind the authentication: FastAPI would read it before.

    Raises:
        HTTPException: 400 with a sentence.
    """
    try:
        return kind.model_validate(await request.json())
    except ValidationError as error:
        detail = " ".join(_sentence(kind, each) for each in error.errors())
    except ValueError:
        detail = f"The body is not JSON. Send an object with {_fields(kind)}."
    raise HTTPException(status_code=400, detail=detail)


def _sentence(kind: type[BaseModel], error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{name} is no field of this call. The fields are {_fields(kind)}."
    if not name:
        return f"The body is no object. Send an object with {_fields(kind)}."
    return f"{name}={_SHORT.repr(error['input'])}: {error['msg']}. The fields are {_fields(kind)}."


def _fields(kind: type[BaseModel]) -> str:
    return ", ".join(kind.model_fields)


async def _answer(question: Awaitable[Answer]) -> JSONResponse:
    """A view as JSON; 409 when every replica says why it could not."""
    try:
        view = await question
    except OptionError as error:
        raise HTTPException(status_code=400, detail=str(error)) from None
    except LookupError as error:
        raise HTTPException(status_code=404, detail=str(error.args[0])) from None
    except AdminError as error:
        raise HTTPException(status_code=409, detail=str(error)) from None
    except Exception as error:
        logger.warning("Asking the supervisor failed", exc_info=True)
        detail = f"Xinference's supervisor does not answer ({type(error).__name__}). Try again."
        raise HTTPException(status_code=503, detail=detail) from None
    content = view.model_dump()
    problems = [replica["problem"] for replica in content["replicas"]]
    if problems and all(problems):
        raise HTTPException(status_code=409, detail=" ".join(dict.fromkeys(problems)))
    return JSONResponse(content)
