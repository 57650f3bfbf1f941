"""The header of receipts, through FastAPI as Xinference uses it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from xinference_xavier.host import receipt_header
from xinference_xavier.host.receipt_header import HEADER, PATHS, add_receipt_headers, receipt_in

TOKENS = {"engine": 8, "gpu": 16, "cpu": 24, "peer": 32, "computed": 20}
DETAILS = {"cached_tokens": 80, "xavier": TOKENS}
VALUE = "engine=8, gpu=16, cpu=24, peer=32, computed=20"
LOGPROBS = {"top_logprobs": [{"xavier": -1.0, '"xavier":{"gpu":1}': -2.0}]}


def body(details: Any, **others: Any) -> dict[str, Any]:
    return {**others, "usage": {"prompt_tokens_details": details}}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (body(DETAILS), VALUE),
        (body(DETAILS, choices=[{"text": '"xavier":{"gpu":1}', "logprobs": LOGPROBS}]), VALUE),
        (body({"cached_tokens": 80}), None),
        (body({"cached_tokens": 80}, text='"prompt_tokens_details":{"xavier":{"gpu":1}}'), None),
        ({"text": '"prompt_tokens_details":{"xavier":{"gpu":1}}', "usage": {}}, None),
        ({}, None),
    ],
)
def test_found_by_its_place_and_in_no_text(answer: Any, value: str | None, separators: Any) -> None:
    assert receipt_in(json.dumps(answer, separators=separators).encode()) == value


class Api:
    """Endpoints of the host's kind: methods that take the request and return a response."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.router = APIRouter()
        for path in (*PATHS, "/v1/other"):
            self.router.add_api_route(path, self.create, methods=["POST"], response_model=dict)
        self.router.add_api_route(PATHS[0], self.show, methods=["GET"])
        add_receipt_headers(self.router)
        self.app = FastAPI()
        self.app.include_router(self.router)

    async def create(self, request: Request) -> Response:
        asked = await request.json()
        if asked.get("stream"):
            return StreamingResponse(iter([json.dumps(self.content)]))
        return JSONResponse(self.content, headers={"kept": "yes"})

    async def show(self) -> Response:
        return JSONResponse(self.content)

    async def ask(self, path: str, method: str = "POST", **asked: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            answer = await client.request(method, path, json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.json() == self.content
        return answer


@pytest.mark.parametrize("path", PATHS)
async def test_responses_of_both_kinds_of_completions_have_it(path: str) -> None:
    answer = await Api(body(DETAILS)).ask(path)
    assert answer.headers[HEADER] == VALUE
    assert answer.headers["kept"] == "yes"


async def test_streams_other_routes_and_models_without_the_cache_have_none() -> None:
    for path, method, asked in (
        (PATHS[0], "POST", {"stream": True}),
        (PATHS[0], "GET", {}),
        ("/v1/other", "POST", {}),
    ):
        assert HEADER not in (await Api(body(DETAILS)).ask(path, method, **asked)).headers
    assert HEADER not in (await Api(body({"cached_tokens": 3})).ask(PATHS[0])).headers


async def test_a_receipt_that_cannot_be_read_costs_the_header_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receipt_header, "_faults", iter(range(1, 10)))
    api = Api(body({"xavier": {"gpu": "many"}}))
    for _ in range(5):
        assert HEADER not in (await api.ask(PATHS[0])).headers
    assert caplog.text.count(HEADER) == 3  # the 1st, the 2nd and the 4th
