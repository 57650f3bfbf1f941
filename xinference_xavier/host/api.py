"""Xinference's REST API with launch validation and the ``/v1/xavier`` routes.

Covers: the hook on ``xinference.api.routers``, the check of launch bodies behind the host's
authentication, the routes that show the cache, and the header of receipts. Does not cover: what is
checked (``options.py``) and where the numbers come from (``view.py``, ``receipt_header.py``). Runs
in Xinference's API process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fastapi import Depends, HTTPException, Request, Security
from fastapi.responses import JSONResponse

from xinference_xavier.config import SWITCH
from xinference_xavier.host import compat, watch
from xinference_xavier.host.admin import Admin, tokenizer_of
from xinference_xavier.host.admin_routes import add_admin_routes
from xinference_xavier.host.options import validate_launch
from xinference_xavier.host.parts import READ_SCOPE, WRITE_SCOPE, Parts, join
from xinference_xavier.host.receipt_header import add_receipt_headers
from xinference_xavier.host.view import CacheView, ClusterView, KnownModel, ModelView
from xinference_xavier.types import OptionError

logger = logging.getLogger(__name__)

#: Launching route of the host -> the launch arguments within its body.
LAUNCH_ROUTES: dict[str, Callable[[Any], Any]] = {
    "/v1/models": lambda body: body,
    "/v1/autostart/models": lambda body: body.get("launch"),
}


def on_routers(module: ModuleType) -> None:
    """Wrap ``register_all_routes``, which the host calls once per API process."""
    original = module.register_all_routes
    if getattr(original, "_adds_snapshot_cache", False):
        return

    @functools.wraps(original)
    def register_all_routes(api: Any) -> None:
        original(api)
        try:
            attach(api)
        except Exception as error:
            logger.warning(
                "The /v1/xavier routes are not available (%s: %s). Xinference works as without "
                "xinference-xavier; run `xinference-xavier doctor` for what to do.",
                type(error).__name__,
                error,
            )

    register_all_routes._adds_snapshot_cache = True  # type: ignore[attr-defined]
    module.register_all_routes = register_all_routes  # type: ignore[attr-defined]


def attach(api: Any) -> None:
    """Add our checks and routes to one API instance, before the host includes its router.

    Afterwards ``xavier_admin`` of the application's state steers the caches of all models.

    Raises:
        HostChangedError: the instance lacks an attribute that we need.
    """
    missing = compat.missing_on(api)
    if missing:
        raise compat.HostChangedError(missing)
    _check_launches(api)
    _add_routes(api)
    add_receipt_headers(api._router)
    _add_dry_run(api)
    state = api._app.state
    auth = api._auth_service if api.is_authenticated() else None
    join(Parts(api._app, auth, state.xavier_sampler, state.xavier_admin))


def _check_launches(api: Any) -> None:
    """Put a check behind the authentication of each launching route."""
    for route in api._router.routes:
        read = LAUNCH_ROUTES.get(getattr(route, "path", ""))
        if read is not None and "POST" in route.methods:
            # A route may authenticate in its own signature, which comes after its dependencies.
            # FastAPI runs a dependency with the same scopes once per request.
            route.dependencies.extend([*_secured(api, WRITE_SCOPE), Depends(_launch_check(read))])


def _launch_check(read: Callable[[Any], Any]) -> Callable[[Request], Any]:
    async def check_launch(request: Request) -> None:
        payload = await _launch_arguments(request, read)
        if payload is None:
            return
        try:
            _, warnings = await asyncio.to_thread(validate_launch, payload)
        except OptionError as error:
            raise HTTPException(status_code=400, detail=str(error)) from None
        for warning in warnings:
            logger.warning("Launch of %s: %s", payload.get("model_uid") or "a model", warning)

    return check_launch


async def _launch_arguments(
    request: Request, read: Callable[[Any], Any]
) -> Mapping[str, Any] | None:
    """The launch arguments, or None for a body that the host itself will refuse."""
    try:
        body = await request.json()
    except ValueError:
        return None
    payload = read(body) if isinstance(body, Mapping) else None
    return payload if isinstance(payload, Mapping) else None


def _secured(api: Any, scope: str) -> list[Any]:
    """The host's authentication as a route's dependency; empty when it is switched off."""
    return [Security(api._auth_service, scopes=[scope])] if api.is_authenticated() else []


def _add_routes(api: Any) -> None:
    async def known_models() -> dict[str, KnownModel]:
        supervisor = await api._get_supervisor_ref()
        instances = await supervisor.get_instance_info(None, None)
        return {instance["model_uid"]: _known(instance) for instance in instances}

    cluster = ClusterView(api._supervisor_address, known_models)
    watch.attach(api, cluster)

    async def show_cache() -> JSONResponse:
        """Every model that keeps snapshots, its replicas, tiers and counters."""
        found = await _reach(cluster.models())
        return JSONResponse(CacheView(models=found).model_dump())

    async def show_model(model_uid: str) -> JSONResponse:
        """One model's replicas, tiers and counters."""
        found = await _reach(cluster.models(model_uid))
        view = found[0] if found else _without_cache(model_uid, await _reach(known_models()))
        return JSONResponse(view.model_dump())

    for path, endpoint, model in (
        ("/v1/xavier", show_cache, CacheView),
        ("/v1/xavier/{model_uid}", show_model, ModelView),
    ):
        api._router.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            response_model=model,
            dependencies=_secured(api, READ_SCOPE),
        )
    admin = api._app.state.xavier_admin = Admin(cluster.places, known_models, tokenizer_of(api))
    add_admin_routes(api._router, admin, lambda: _secured(api, WRITE_SCOPE))


def _add_dry_run(api: Any) -> None:
    """``POST /v1/xavier/validate``, with the scope of launching: it looks at the model's folder."""

    async def validate(request: Request) -> JSONResponse:
        """Whether ``POST /v1/models`` with this body would pass our checks. Launches nothing."""
        payload = await _launch_arguments(request, LAUNCH_ROUTES["/v1/models"])
        if payload is None:
            detail = "The body is no JSON object. Give the body of POST /v1/models."
            raise HTTPException(status_code=400, detail=detail)
        try:
            _, warnings = await asyncio.to_thread(validate_launch, payload)
        except OptionError as error:
            return JSONResponse({"problem": str(error), "warnings": []})
        return JSONResponse({"problem": None, "warnings": warnings})

    api._router.add_api_route(
        "/v1/xavier/validate",
        validate,
        methods=["POST"],
        dependencies=_secured(api, WRITE_SCOPE),
    )


async def _reach(question: Any) -> Any:
    """The answer, or HTTP 503 when the supervisor cannot be asked."""
    try:
        return await question
    except Exception as error:
        logger.warning("Asking the supervisor failed", exc_info=True)
        detail = f"Xinference's supervisor does not answer ({type(error).__name__}). Try again."
        raise HTTPException(status_code=503, detail=detail) from None


def _known(instance: Mapping[str, Any]) -> KnownModel:
    """A model of the supervisor's list; an error is in the words of its engine."""
    replicas = instance.get("replica_statuses") or []
    error = next((status["error_message"] for status in replicas if status["error_message"]), None)
    return KnownModel(error, frozenset(status["replica_id"] for status in replicas))


def _without_cache(model_uid: str, known: Mapping[str, KnownModel]) -> ModelView:
    """View of a model that no replica reports a cache for; HTTP 404 when there is no such model."""
    if model_uid not in known:
        detail = f"There is no model {model_uid!r}. GET /v1/models lists the running ones."
        raise HTTPException(status_code=404, detail=detail)
    error = known[model_uid].error
    if error is not None:
        detail = f"{model_uid!r} did not start: {error}"
    else:
        detail = (
            f"No replica of {model_uid!r} reports a snapshot cache. Launch it with {SWITCH}=true "
            "to get one. If it was, its replicas have not been heard of yet."
        )
    return ModelView(model_uid=model_uid, enabled=False, detail=detail, replicas=[])
