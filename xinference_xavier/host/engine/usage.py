"""A request's receipt in the usage that Xinference reports.

Covers: taking receipts out of vLLM's outputs and putting them beside the host's own
``cached_tokens``; hiding both where the launch says so. Does not cover: counting
(``engine/receipts.py``) and the response's header (``host/receipt_header.py``). Runs in the model
process, on its event loop. A fault here leaves the host's own usage.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from xinference.model.llm.vllm.core import VLLMModel

from xinference_xavier.engine.compat_receipts import keep_params_when_merged
from xinference_xavier.engine.receipts import PARAMS_KEY, SOURCES

logger = logging.getLogger(__name__)

#: Key of the receipt in ``usage.prompt_tokens_details``.
DETAILS_KEY = "xavier"

_faults = itertools.count(1)


class MarkedOutputs:
    """A request's outputs, each with the receipt as far as it is known.

    The engine tells with the first output and with the last; the host computes usage from each, and
    from the last one alone where it does not stream. With several choices, each of which is a
    request to vLLM, the receipt is that of the choice that computed most: usage counts the prompt
    once.

    Args:
        outputs: what vLLM's ``generate`` returned.
        shown: False hides how much of the prompt was cached, by us and by vLLM.
    """

    def __init__(self, outputs: AsyncIterator[Any], shown: bool) -> None:
        self._outputs = outputs
        self._shown = shown
        self._receipt: dict[str, int] | None = None

    def __aiter__(self) -> MarkedOutputs:
        return self

    async def __anext__(self) -> Any:
        output = await self._outputs.__anext__()
        try:
            self._mark(output)
        except Exception:
            _report_fault()
        return output

    async def aclose(self) -> None:
        """Ends the request, as closing vLLM's own generator does."""
        close = getattr(self._outputs, "aclose", None)
        if close is not None:
            await close()

    def _mark(self, output: Any) -> None:
        params = output.kv_transfer_params
        if not self._shown:  # the engine does not tell then, but vLLM does
            output.num_cached_tokens = output.kv_transfer_params = None
            return
        receipt = (params or {}).get(PARAMS_KEY)
        known = self._receipt
        if receipt is not None and (known is None or receipt["computed"] > known["computed"]):
            self._receipt = receipt
        if self._receipt is not None:
            output.kv_transfer_params = {**(params or {}), PARAMS_KEY: self._receipt}


class ReceiptsMixin:
    """Goes before one of the host's vLLM classes."""

    _xavier: dict[str, Any] | None

    def prepare_receipts(self) -> None:
        """Before the engine starts; only with our switch."""
        assert self._xavier is not None
        if self._xavier["xavier_receipts"]:
            keep_params_when_merged()

    def _track_engine_request(self, request_id: str, results_generator: Any) -> Any:
        if self._xavier is not None:
            shown = self._xavier["xavier_receipts"]
            results_generator = MarkedOutputs(aiter(results_generator), shown)
        return super()._track_engine_request(  # type: ignore[misc]
            request_id, results_generator
        )

    @staticmethod
    def _get_completion_usage(request_output: Any) -> Any:
        """The host asks for each streamed output."""
        usage = VLLMModel._get_completion_usage(request_output)
        return with_receipt(usage, request_output)

    @staticmethod
    def _convert_request_output_to_completion(
        request_id: str, model: str, request_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The host asks once, for a response that is not streamed."""
        completion = VLLMModel._convert_request_output_to_completion(
            request_id, model, request_output, *args, **kwargs
        )
        completion["usage"] = with_receipt(completion["usage"], request_output)
        return completion

    @classmethod
    def _sanitize_usage(cls, usage: Any) -> Any:
        """Chat models only: the host copies the fields it knows."""
        sanitized = super()._sanitize_usage(usage)  # type: ignore[misc]
        try:
            known = usage if isinstance(usage, dict) else {}
            details = known.get("prompt_tokens_details") or {}
            if DETAILS_KEY in details and "prompt_tokens_details" in (sanitized or {}):
                sanitized["prompt_tokens_details"][DETAILS_KEY] = details[DETAILS_KEY]
        except Exception:
            _report_fault()
        return sanitized


def with_receipt(usage: Any, request_output: Any) -> Any:
    """``usage`` of one of vLLM's outputs with its receipt, unless that does not add up."""
    try:
        receipt = _receipt_of(request_output)
        if receipt is not None and sum(receipt.values()) == usage["prompt_tokens"]:
            cached = usage["prompt_tokens"] - receipt["computed"]
            usage["prompt_tokens_details"] = {"cached_tokens": cached, DETAILS_KEY: receipt}
    except Exception:
        _report_fault()
    return usage


def _receipt_of(request_output: Any) -> dict[str, int] | None:
    """Tokens by source, or None of an output without a receipt."""
    params = getattr(request_output, "kv_transfer_params", None)
    receipt = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    return None if receipt is None else {source: receipt[source] for source in SOURCES}


def _report_fault() -> None:
    if next(_faults).bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... of a burst
        logger.warning("xavier: a response goes without its receipt", exc_info=True)
