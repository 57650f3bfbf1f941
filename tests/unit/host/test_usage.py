"""Receipts in Xinference's responses: its own conversions over vLLM's own output processor.

The engine core is played by the test: which tokens it sampled, and what it told with them. From
there on everything is real, stop strings and the merging of unread outputs included.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xinference")
pytest.importorskip("vllm")

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from test_classes import LAUNCH, SWITCH, build
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from xinference.model.llm.vllm.core import VLLMChatModel, VLLMModel

from xinference_xavier.engine.compat_receipts import keep_params_when_merged
from xinference_xavier.engine.receipts import Receipt
from xinference_xavier.host.engine import usage
from xinference_xavier.host.engine.classes import XavierVLLMChatModel, XavierVLLMModel

PROMPT = "p" * 100
#: The host's own count, which a receipt replaces; no receipt here gives the same.
HOSTS_COUNT = 3


def tokenizer() -> Any:
    """One token is one byte, so a prompt's length is its tokens."""
    path = Path(__file__).parents[3] / "examples" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model_tokenizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.byte_level_tokenizer()


@dataclass
class Engine:
    """vLLM's ``AsyncLLM`` without its engine core.

    Attributes:
        answer: what the core samples, for each choice.
        tiers: the receipt's sources but ``computed``, for each choice; None: it tells nothing.
        tells: the numbers of the outputs that tell; -1 is the one that ends the request.
        unread: outputs come faster than they are read.
    """

    answer: Sequence[str] = ("some words",)
    tiers: Sequence[tuple[int, int, int, int] | None] = ((8, 16, 24, 32),)
    tells: Sequence[int] = (0, -1)
    unread: bool = False
    closed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = tokenizer()
        self.processor = OutputProcessor(self.tokenizer, log_stats=False)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[RequestOutput]:
        text = prompt["prompt"] if isinstance(prompt, dict) else prompt
        prompt_ids = self.tokenizer(text).input_ids
        queue = RequestOutputCollector(params.output_kind, request_id)
        self._add(text, prompt_ids, params, request_id, queue)
        core = asyncio.ensure_future(self._run(prompt_ids, params, request_id))
        try:
            if self.unread:
                await core
            finished = False
            while not finished:
                output = await queue.get()
                finished = output.finished
                yield output
        finally:
            core.cancel()
            self.closed.append(request_id)

    def _add(self, text: str, ids: Any, params: Any, request_id: str, queue: Any) -> None:
        def request(own_id: str, own_params: SamplingParams) -> EngineCoreRequest:
            own = EngineCoreRequest(
                own_id, ids, None, own_params, None, time.time(), None, None, None
            )
            own.external_req_id = request_id
            return own

        if params.n == 1:
            self.processor.add_request(request(request_id, params), text, None, 0, queue)
            return
        parent = ParentRequest(request(request_id, params))
        for index in range(params.n):
            child_id, child_params = parent.get_child_info(index)
            self.processor.add_request(request(child_id, child_params), text, parent, index, queue)

    async def _run(self, prompt_ids: Any, params: Any, request_id: str) -> None:
        """Every choice gets a token a step, the later ones start a step later."""
        ids = [request_id] if params.n == 1 else [f"{i}_{request_id}" for i in range(params.n)]
        sampled = [self.tokenizer(answer).input_ids for answer in self.answer]
        for step in range(max(map(len, sampled)) + len(ids)):
            outputs = []
            for index, (own_id, tokens) in enumerate(zip(ids, sampled, strict=True)):
                number = step - index
                if 0 <= number < len(tokens) and own_id in self.processor.request_states:
                    outputs.append(self._output(own_id, index, number, tokens, prompt_ids))
                    self.processor.request_states[own_id].num_cached_tokens = HOSTS_COUNT
            self.processor.process_outputs(outputs)
            if not self.unread:
                await asyncio.sleep(0)

    def _output(
        self, own_id: str, index: int, number: int, tokens: Any, prompt_ids: Any
    ) -> EngineCoreOutput:
        last = number == len(tokens) - 1
        output = EngineCoreOutput(own_id, [tokens[number]])
        if last:
            output.finish_reason = FinishReason.LENGTH
        tiers = self.tiers[index]
        if tiers is not None and (number in self.tells or (last and -1 in self.tells)):
            computed = len(prompt_ids) - sum(tiers)
            receipt = Receipt(own_id, len(prompt_ids), *tiers, computed)
            output.kv_transfer_params = receipt.as_params()
        return output


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model process that has loaded."""
    monkeypatch.setattr(RequestOutput, "add", RequestOutput.add)  # put back afterwards
    keep_params_when_merged()


def make(cls: type, path: Path, engine: Engine, **options: Any) -> Any:
    model = build(cls, path, {**LAUNCH, **SWITCH, **options})
    model._engine = engine
    return model


async def complete(model: Any, **config: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await model.async_generate(PROMPT, {"max_tokens": 64, **config})
    Completion.model_validate(answer)
    return answer


async def stream(model: Any, **config: Any) -> list[dict[str, Any]]:
    config = {
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        **config,
    }
    return [chunk async for chunk in await model.async_generate(PROMPT, config)]


def details(usage: dict[str, Any]) -> dict[str, Any]:
    """Checks that sources sum up to the prompt."""
    found: dict[str, Any] = usage["prompt_tokens_details"]
    receipt = found["xavier"]
    assert sum(receipt.values()) == usage["prompt_tokens"]
    assert found["cached_tokens"] == usage["prompt_tokens"] - receipt["computed"]
    return found


EXPECTED = {
    "cached_tokens": 80,
    "xavier": {"engine": 8, "gpu": 16, "cpu": 24, "peer": 32, "computed": 20},
}
PLAIN = {"cached_tokens": HOSTS_COUNT}

#: What the engine tells: with both, as ours does; with one of them; merged with later outputs.
WAYS = {
    "both": Engine(),
    "last": Engine(tells=(-1,)),
    "first": Engine(tells=(0,)),
    "unread": Engine(tells=(0,), unread=True),
}


@pytest.fixture(params=WAYS)
def engine(request: pytest.FixtureRequest, merging: None) -> Engine:
    return WAYS[request.param]


async def test_completions(tmp_path: Path, engine: Engine) -> None:
    model = make(XavierVLLMModel, tmp_path, engine)
    answer = await complete(model)
    assert answer["choices"][0]["text"] == "some words"
    assert details(answer["usage"]) == EXPECTED
    chunks = await stream(model)
    assert chunks[-1]["choices"] == []
    assert details(chunks[-1]["usage"]) == EXPECTED
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "some words"


async def test_a_stop_string_ends_it_outside_the_engine(tmp_path: Path, merging: None) -> None:
    """vLLM finds it in the model process: the engine's last output never comes."""
    for unread in (False, True):
        model = make(XavierVLLMModel, tmp_path, Engine(unread=unread))
        answer = await complete(model, stop=["wo"])
        assert answer["choices"][0]["text"] == "some "
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert details(answer["usage"]) == EXPECTED
        assert details((await stream(model, stop=["wo"]))[-1]["usage"]) == EXPECTED


MESSAGES = [{"role": "user", "content": "u" * 80}]


async def test_chat(tmp_path: Path, engine: Engine) -> None:
    model = make(XavierVLLMChatModel, tmp_path, engine)
    answer = await model.async_chat(MESSAGES, {"max_tokens": 64})
    known = {k: v for k, v in EXPECTED["xavier"].items() if k != "computed"}
    for reported in (answer["usage"], (await chat_stream(model))[-1]["usage"]):
        assert details(reported)["xavier"].items() >= known.items()
    parsed = ChatCompletion.model_validate(answer)
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 80
    assert parsed.usage.prompt_tokens_details.model_extra["xavier"]["peer"] == 32


async def chat_stream(model: Any, **config: Any) -> list[dict[str, Any]]:
    config |= {"max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await model.async_chat(MESSAGES, config)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return chunks


async def test_chat_with_tools(tmp_path: Path) -> None:
    model = make(XavierVLLMChatModel, tmp_path, Engine())
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    answer = await model.async_chat(MESSAGES, {"max_tokens": 64, "tools": list(tools)})
    assert details(answer["usage"])["xavier"]["peer"] == 32
    chunks = await chat_stream(model, tools=list(tools))
    assert details(chunks[-1]["usage"])["xavier"]["peer"] == 32


async def test_messages_of_anthropic_show_it_with_their_first_chunk(tmp_path: Path) -> None:
    """That is where such a stream says how much of its input was cached."""
    model = make(XavierVLLMChatModel, tmp_path, Engine())
    chunks = await chat_stream(model, _anthropic_request=True)
    assert details(chunks[0]["usage"])["cached_tokens"] == 80


async def test_several_choices_show_the_one_that_computed_most(
    tmp_path: Path, merging: None
) -> None:
    for unread in (False, True):
        engine = Engine(
            answer=("first one", "second"), tiers=((0, 0, 0, 0), (96, 0, 0, 0)), unread=unread
        )
        model = make(XavierVLLMModel, tmp_path, engine)
        if unread:  # the last receipt was kept, the one before was merged away
            assert details((await complete(model, n=2))["usage"])["cached_tokens"] in (0, 96)
        else:
            assert details((await complete(model, n=2))["usage"])["cached_tokens"] == 0


@pytest.mark.parametrize(
    "engine",
    [Engine(tiers=(None,)), Engine(tells=())],
    ids=["no receipt", "never told"],
)
async def test_without_a_receipt_usage_is_the_hosts(tmp_path: Path, engine: Engine) -> None:
    ours, hosts = make(XavierVLLMModel, tmp_path, engine), build(VLLMModel, tmp_path, LAUNCH)
    hosts._engine = engine
    found = (await complete(ours))["usage"]
    assert found == (await complete(hosts))["usage"]
    assert found["prompt_tokens_details"] == PLAIN
    assert (await stream(ours))[-1]["usage"] == (await stream(hosts))[-1]["usage"]


@pytest.mark.parametrize(
    "told",
    [
        {"engine": 1},
        {"engine": 0, "gpu": 0, "cpu": 0, "peer": 0, "computed": 7},
        {"engine": "0", "gpu": None, "cpu": 0, "peer": 0, "computed": 7},
        [1, 2, 3],
    ],
    ids=["a part", "another prompt's", "no numbers", "no receipt"],
)
async def test_a_receipt_that_makes_no_sense_is_not_shown(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Receipt, "as_params", lambda self: {"xavier_receipt": told})
    model = make(XavierVLLMModel, tmp_path, Engine())
    assert (await complete(model))["usage"]["prompt_tokens_details"] == PLAIN


async def test_faults_of_ours_are_logged_once_per_burst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise TypeError("planned")

    monkeypatch.setattr(usage, "_receipt_of", fail)
    monkeypatch.setattr(usage, "_faults", iter(range(1, 100)))
    model = make(XavierVLLMModel, tmp_path, Engine())
    for _ in range(5):
        assert (await complete(model))["usage"]["prompt_tokens_details"] == PLAIN
    assert caplog.text.count("without its receipt") == 3  # the 1st, the 2nd and the 4th


async def test_switched_off_nothing_tells_what_was_cached(tmp_path: Path) -> None:
    model = make(XavierVLLMModel, tmp_path, Engine(), xavier_receipts=False)
    assert "prompt_tokens_details" not in (await complete(model))["usage"]
    chunks = await stream(model)
    assert not any("prompt_tokens_details" in chunk.get("usage", {}) for chunk in chunks)


async def test_closing_a_stream_ends_the_request(tmp_path: Path) -> None:
    aborted = []
    engine = Engine()
    engine.abort = aborted.append  # type: ignore[attr-defined]
    model = make(XavierVLLMModel, tmp_path, engine)
    chunks = await model.async_generate(
        PROMPT, {"max_tokens": 64, "stream": True}, request_id="closed"
    )
    async for _ in chunks:
        break
    await chunks.aclose()
    del chunks
    for _ in range(100):  # the host leaves the inner streams to the event loop's own clean-up
        if engine.closed:
            break
        await asyncio.sleep(0.01)
    assert aborted == ["closed"]
    assert engine.closed == ["closed"]


async def test_launch_without_the_switch_is_the_hosts_alone(tmp_path: Path) -> None:
    """Even if another connector's parameters pass by."""
    ours = build(XavierVLLMModel, tmp_path, dict(LAUNCH))
    hosts = build(VLLMModel, tmp_path, dict(LAUNCH))
    for model in (ours, hosts):
        model._engine = Engine(tiers=(None,))
    assert (await complete(ours))["usage"] == (await complete(hosts))["usage"]
    assert VLLMChatModel._sanitize_usage(None) is XavierVLLMChatModel._sanitize_usage(None) is None
