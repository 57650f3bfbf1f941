"""How a request's receipt gets out of vLLM (0.27 to 0.32): with its first output and with its last.

A connector may add ``kv_transfer_params`` to the output that ends a request, and no other. That is
not enough: a request that meets a stop string ends in the model process, and the engine, which
hears of an abort, says nothing more. So the first output carries them too. Both patches are found
by name and left out where vLLM has none; then the last output alone tells.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from xinference_xavier import swallowed
from xinference_xavier.engine.receipts import Receipt

logger = logging.getLogger(__name__)


def send_with_first_outputs() -> None:
    """In the engine's process: give outputs the receipts that wait for them.

    Costs a step nothing unless a request's first output is due; then a look at each output of it.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = getattr(Scheduler, "update_from_output", None)
    if original is None or hasattr(original, "xavier"):
        return

    @functools.wraps(original)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        untold = getattr(self.connector, "untold_receipts", None)
        if untold:
            try:
                _add_receipts(outputs, untold)
            except Exception:  # of ours alone: what waited is told by the last outputs
                untold.clear()
                swallowed.note(logger, "receipt", "first outputs go without receipts")
        return outputs

    update_from_output.xavier = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_from_output


def _add_receipts(outputs: Mapping[int, Any], untold: dict[str, Receipt]) -> None:
    """``outputs`` are the ``EngineCoreOutputs`` of a step, by client."""
    for client in outputs.values():
        for output in client.outputs:
            receipt = untold.pop(output.request_id, None)
            if receipt is not None and output.kv_transfer_params is None:
                output.kv_transfer_params = receipt.as_params()


def keep_params_when_merged() -> None:
    """In the model process: keep an output's parameters when one without any is merged into it.

    vLLM merges outputs that nobody has read yet, and takes the later one's parameters even if it
    has none.
    """
    from vllm.outputs import RequestOutput

    original = getattr(RequestOutput, "add", None)
    if original is None or hasattr(original, "xavier"):
        return

    @functools.wraps(original)
    def add(self: Any, *args: Any, **kwargs: Any) -> None:
        before = getattr(self, "kv_transfer_params", None)
        original(self, *args, **kwargs)
        if self.kv_transfer_params is None:
            self.kv_transfer_params = before

    add.xavier = True  # type: ignore[attr-defined]
    RequestOutput.add = add
