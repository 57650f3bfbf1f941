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
    numbered = statuses and [{**each, "replica_id": n} for n, each in enumerate(statuses)]
    known = {"m": our_api._known({"replica_statuses": numbered})}
    assert known["m"].replicas == set(range(len(statuses or ())))
    view = our_api._without_cache("m", known)
    assert (view.enabled, view.replicas) == (False, [])
    assert words in str(view.detail)
    with pytest.raises(our_api.HTTPException, match="no model 'n'"):
        our_api._without_cache("n", known)


def test_changed_host_keeps_its_own_routes(
    make_api: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(our_api.compat, "missing_on", lambda api: [our_api.compat.SYMBOLS[0]])
    api = make_api(auth=False)
    paths = {getattr(route, "path", None) for route in api._router.routes}
    assert "/v1/models" in paths
    assert "/v1/xavier" not in paths
    assert "/v1/xavier routes are not available" in caplog.text


#: Bodies that pass our checks, for the routes that read one.
GOOD_BODIES = {
    "budgets": {"xavier_gpu_budget": "1GiB"},
    "lookup": {"prompt": "a"},
    "stores": {"paused": True},
    "validate": LAUNCH,
}


def our_routes(api: Any) -> list[tuple[str, str]]:
    """Method and path of every route that this package adds, for a model ``m``."""
    return [
        (method, route.path.replace("{model_uid}", "m"))
        for route in api._router.routes
        if "xavier" in getattr(route, "path", "")
        for method in sorted(route.methods)
    ]


async def keys_of(api: Any) -> dict[str, str]:
    """Tokens and API keys of a user that may only read, and of the first one.

    The host lets API keys read and infer, whoever's they are.
    """
    user = {"username": "reader", "password": "Str0ng-pass-word!"}
    full = await log_in(api)
    async with client(api, full) as admin:
        made = await admin.post("/v1/admin/users", json={**user, "permissions": ["models:list"]})
        made.raise_for_status()
        keys = {}
        for name, owner in {"reader's key": made.json()["id"], "full user's key": None}.items():
            asked = await admin.post("/v1/admin/keys", json={"name": name, "owner": owner})
            asked.raise_for_status()
            keys[name] = asked.json()["key"]
        answer = await admin.post("/token", json=user)
    return {**keys, "reader": answer.json()["access_token"], "full user": full}


async def test_every_route_of_ours_by_every_kind_of_key(make_api: Any) -> None:
    """503 is the missing supervisor: the call had got past authentication."""
    api = make_api(auth=True)
    keys = await keys_of(api)
    routes = our_routes(api)
    assert len(routes) >= 6
    for method, path in routes:
        body = GOOD_BODIES.get(path.rpartition("/")[2])
        codes = {}
        for name, key in {"nobody": None, **keys}.items():
            async with client(api, key) as http:
                codes[name] = (await http.request(method, path, json=body)).status_code
        limited = 503 if method == "GET" else 403
        full = 200 if path.endswith("/validate") else 503  # it asks no supervisor
        assert codes == {
            "nobody": 401,
            "reader's key": limited,
            "full user's key": limited,
            "reader": limited,
            "full user": full,
        }, (method, path)


async def test_nobody_without_a_key_learns_whether_a_body_is_right(make_api: Any) -> None:
    """A broken body is 401, too: FastAPI would answer 422 before it asks who is there."""
    api = make_api(auth=True)
    async with client(api) as nobody:
        for method, path in our_routes(api):
            answer = await nobody.request(method, path, content=b"{not json")
            assert answer.status_code == 401, path


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("budgets", {"xavier_gpu_bugdet": 1}, ["xavier_gpu_bugdet is no field", "xavier_cpu_b"]),
        ("budgets", {}, ["Neither xavier_gpu_budget nor xavier_cpu_budget"]),
        ("budgets", {"xavier_gpu_budget": "4 furlongs"}, ["4 furlongs", "GiB"]),
        ("budgets", {"xavier_cpu_budget": "auto"}, ["xavier_cpu_budget='auto'", "GiB"]),
        ("budgets", {"xavier_gpu_budget": 0, "xavier_cpu_budget": "0"}, ["leave no tier"]),
        ("budgets", {"xavier_gpu_budget": True}, ["xavier_gpu_budget=True is not a size"]),
        ("budgets", [1], ["no object", "xavier_gpu_budget"]),
        ("stores", {"paused": "yes"}, ["paused='yes'", "boolean"]),
        ("stores", {}, ["paused", "required"]),
        ("lookup", {}, ["either prompt", "messages"]),
        ("lookup", {"prompt": "a", "messages": []}, ["either prompt", "messages"]),
        ("lookup", {"prompt": ""}, ["prompt='' is empty"]),
        ("lookup", {"messages": []}, ["is empty"]),
        ("lookup", {"prompt": "a", "cache_salt": ""}, ["cache_salt=''"]),
        ("lookup", "{broken", ["not JSON", "prompt, messages"]),
    ],
)
async def test_bodies_that_cannot_be_are_refused_in_a_sentence(
    make_api: Any, path: str, body: Any, words: list[str]
) -> None:
    method = "PATCH" if path == "budgets" else "POST"
    sent = {"content": body} if isinstance(body, str) else {"json": body}
    async with client(make_api(auth=False)) as http:
        answer = await http.request(method, f"/v1/xavier/m/{path}", **sent)
    assert answer.status_code == 400
    assert all(word in answer.json()["detail"] for word in words), answer.text


async def test_bodies_are_described(make_api: Any) -> None:
    async with client(make_api(auth=False)) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    body = paths["/v1/xavier/{model_uid}/budgets"]["patch"]["requestBody"]["content"]
    assert set(body["application/json"]["schema"]["properties"]) == {
        "xavier_gpu_budget",
        "xavier_cpu_budget",
    }


@pytest.mark.parametrize(
    ("fields", "problem", "warning"),
    [
        ({}, None, None),
        ({"xavier_gpu_budget": "16MiB"}, None, None),
        ({"xavier_gpu_budget": "4 furlongs"}, "xavier_gpu_budget='4 furlongs'", None),
        ({"xavier_cpu_budget": 0}, None, "xavier_cpu_budget=0"),
        ({"model_engine": "sglang"}, "model_engine='sglang'", None),
    ],
)
async def test_a_dry_run_says_what_the_launch_would(
    make_api: Any, fields: dict, problem: str | None, warning: str | None
) -> None:
    body = {**LAUNCH, **SWITCH, **fields}
    async with client(make_api(auth=False)) as http:
        answer = await http.post("/v1/xavier/validate", json=body)
        assert answer.status_code == 200
        verdict = answer.json()
        launched = await http.post("/v1/models", json=body)
    assert (verdict["problem"] or "").startswith(problem or "")
    assert (launched.status_code == 400) == (problem is not None)
    if problem:
        assert launched.json()["detail"] == verdict["problem"]
    assert [said[: len(warning or "")] for said in verdict["warnings"]] == [warning] * bool(warning)


@pytest.mark.parametrize("content", ["not json", "[]", "null"])
async def test_a_dry_run_wants_launch_arguments(make_api: Any, content: str) -> None:
    async with client(make_api(auth=False)) as http:
        answer = await http.post("/v1/xavier/validate", content=content)
    assert answer.status_code == 400
    assert "body of POST /v1/models" in answer.json()["detail"]


async def test_a_dry_run_needs_what_a_launch_needs(make_api: Any) -> None:
    """It tells whether a folder of the server holds a model."""
    api = make_api(auth=True)
    token = await log_in(api)
    async with client(api) as anonymous, client(api, token) as known:
        user = {"username": "reader", "password": "Str0ng-pass-word!"}
        permissions = {"permissions": ["models:list"]}
        (await known.post("/v1/admin/users", json={**user, **permissions})).raise_for_status()
        reader = (await anonymous.post("/token", json=user)).json()["access_token"]
        assert (await anonymous.post("/v1/xavier/validate", json=LAUNCH)).status_code == 401
        assert (await known.post("/v1/xavier/validate", json=LAUNCH)).status_code == 200
    async with client(api, reader) as reading:
        assert (await reading.get("/v1/xavier")).status_code == 503
        assert (await reading.post("/v1/xavier/validate", json=LAUNCH)).status_code == 403
