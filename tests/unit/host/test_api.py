"""Launch validation and routes on Xinference's real API object, without a supervisor behind it.

Accepted launches end at the missing supervisor, which is how these tests tell them from refused
ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xinference")

import httpx
from xinference.api import restful_api, routers

from xinference_xavier.host import api as our_api

LAUNCH = {"model_name": "qwen2.5-instruct", "model_engine": "vLLM", "model_uid": "m"}
SWITCH = {"enable_xavier_gpu": True}
BAD = {**LAUNCH, **SWITCH, "xavier_gpu_budget": "4 furlongs"}
CACHE_ROUTES = ("/v1/xavier", "/v1/xavier/m")

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


@pytest.fixture(autouse=True)
def _collect_connections() -> Iterator[None]:
    """xoscar leaves client connections to the collector: not to that of another test."""
    yield
    gc.collect()


@pytest.fixture
def make_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (
        "XINFERENCE_AUTH_DB_PATH",
        "XINFERENCE_LAUNCH_HISTORY_DB_PATH",
        "XINFERENCE_MONITOR_CONFIG_DB_PATH",
        "XINFERENCE_SYSTEM_SETTINGS_PATH",
    ):
        monkeypatch.setattr(restful_api, name, str(tmp_path / name))
    # One per process, bound to its first path.
    monkeypatch.setattr("xinference.core.system_settings_store._store", None)
    monkeypatch.setenv("XINFERENCE_AUTH_JWT_SECRET_KEY", "k" * 48)
    monkeypatch.setenv(
        "XINFERENCE_AUTH_ENCRYPTION_KEY", "YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE="
    )

    def make(auth: bool) -> Any:
        monkeypatch.setenv("XINFERENCE_AUTH_ADVANCED", "1" if auth else "0")
        api = restful_api.RESTfulAPI("127.0.0.1:9", "127.0.0.1", 0)
        api._app.state.api = api
        api._app.state.advanced_auth = api._advanced_auth_service
        our_api.on_routers(routers)
        our_api.on_routers(routers)
        routers.register_all_routes(api)
        if auth:
            from xinference.api.oauth2.advanced.routes import register_advanced_auth_routes

            register_advanced_auth_routes(api)
        api._app.include_router(api._router)
        return api

    return make


def client(api: Any, token: str | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(api._app, raise_app_exceptions=False),
        base_url="http://api",
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )


async def log_in(api: Any) -> str:
    user = {"username": "admin", "password": "Str0ng-pass-word!"}
    token = api._advanced_auth_service.setup_token
    async with client(api) as anonymous:
        made = await anonymous.post("/v1/admin/setup", json={**user, "setup_token": token})
        made.raise_for_status()
        answer = await anonymous.post("/token", json=user)
        return answer.json()["access_token"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"xavier_gpu_budget": "4 furlongs"}, ["xavier_gpu_budget", "4 furlongs", "GiB"]),
        ({"xavier-gpu-bugdet": 1}, ["xavier-gpu-bugdet", "Did you mean xavier_gpu_budget"]),
        ({"model_engine": "sglang"}, ["model_engine", "sglang", "vLLM"]),
        ({"enable_xavier": True}, ["enable_xavier"]),
        ({"kv_transfer_config": {"kv_connector": "x"}}, ["kv_transfer_config"]),
    ],
)
async def test_refusals_are_sentences(make_api: Any, fields: dict, words: list[str]) -> None:
    async with client(make_api(auth=False)) as http:
        body = {**LAUNCH, **SWITCH, **fields}
        for path, sent in (("/v1/models", body), ("/v1/autostart/models", {"launch": body})):
            answer = await http.post(path, json=sent)
            assert answer.status_code == 400, path
            assert all(word in answer.json()["detail"] for word in words), answer.text


@pytest.mark.parametrize("fields", [{}, SWITCH, {**SWITCH, "enable_virtual_env": True}])
async def test_good_launches_and_launches_without_the_switch_pass(
    make_api: Any, fields: dict
) -> None:
    async with client(make_api(auth=False)) as http:
        answer = await http.post("/v1/models", json={**LAUNCH, **fields})
        assert answer.status_code == 500
        assert "Connect call failed" in answer.json()["detail"]


@pytest.mark.parametrize("content", ["not json", "[]", "null", '"text"', '{"launch": 3}'])
async def test_bodies_the_host_refuses_are_left_to_it(make_api: Any, content: str) -> None:
    async with client(make_api(auth=False)) as http:
        for path in our_api.LAUNCH_ROUTES:
            answer = await http.post(path, content=content)
            assert "xavier" not in answer.text
            assert answer.status_code >= 400


async def test_warnings_are_logged(make_api: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with client(make_api(auth=False)) as http:
        await http.post("/v1/models", json={**LAUNCH, **SWITCH, "xavier_cpu_budget": 0})
    assert "Launch of m: xavier_cpu_budget=0" in caplog.text


async def test_authentication_comes_before_validation(make_api: Any) -> None:
    api = make_api(auth=True)
    token = await log_in(api)
    bodies = {"/v1/models": BAD, "/v1/autostart/models": {"launch": BAD}}
    async with client(api) as anonymous, client(api, token) as known:
        for path, body in bodies.items():
            assert (await anonymous.post(path, json=body)).status_code == 401
            refused = await known.post(path, json=body)
            assert (refused.status_code, "furlongs" in refused.text) == (400, True)


async def test_one_bad_credential_is_counted_once(make_api: Any) -> None:
    """Ten failures ban an address: a check of ours must not double them."""
    api = make_api(auth=True)
    async with client(api, "wrong") as stranger:
        for _ in range(9):
            assert (await stranger.post("/v1/models", json=BAD)).status_code == 401
    token = await log_in(api)
    async with client(api, token) as known:
        assert (await known.post("/v1/models", json=BAD)).status_code == 400


async def test_routes_want_a_credential_when_authentication_is_on(make_api: Any) -> None:
    api = make_api(auth=True)
    token = await log_in(api)
    async with client(api) as anonymous, client(api, token) as known:
        for path in CACHE_ROUTES:
            assert (await anonymous.get(path)).status_code == 401
            assert (await known.get(path)).status_code == 503


async def test_routes_say_when_the_supervisor_does_not_answer(make_api: Any) -> None:
    async with client(make_api(auth=False)) as http:
        for path in CACHE_ROUTES:
            answer = await http.get(path)
            assert answer.status_code == 503
            assert "supervisor does not answer" in answer.json()["detail"]


async def test_routes_are_described(make_api: Any) -> None:
    async with client(make_api(auth=False)) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/xavier/{model_uid}"]["get"]["responses"]["200"]["content"]
    assert schema["application/json"]["schema"]["$ref"].endswith("/ModelView")
    assert "/v1/xavier" in paths


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([], "Launch it with enable_xavier_gpu=true"),
        ([{"error_message": None}, {"error_message": "too small"}], "did not start: too small"),
        (None, "have not been heard of yet"),
    ],
)
def test_a_model_without_a_cache_says_why(statuses: Any, words: str) -> None:
    error = our_api._launch_error({"replica_statuses": statuses})
    view = our_api._without_cache("m", {"m": error})
    assert (view.enabled, view.replicas) == (False, [])
    assert words in str(view.detail)
    with pytest.raises(our_api.HTTPException, match="no model 'n'"):
        our_api._without_cache("n", {"m": error})


def test_changed_host_keeps_its_own_routes(
    make_api: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(our_api.compat, "missing_on", lambda api: [our_api.compat.SYMBOLS[0]])
    api = make_api(auth=False)
    paths = {getattr(route, "path", None) for route in api._router.routes}
    assert "/v1/models" in paths
    assert "/v1/xavier" not in paths
    assert "/v1/xavier routes are not available" in caplog.text
