"""Token ids of a prompt as one of the host's vLLM models makes them for a request.

Covers: texts, and messages under the model's chat template. Does not cover media, tools and other
fields of a request. Runs on the event loop of the model process.
"""

from __future__ import annotations

import copy
from typing import Any


async def prompt_tokens(model: Any, prompt: Any) -> list[int]:
    """Token ids of a text or of chat messages.

    Raises:
        ValueError: the model does not take it.
    """
    try:
        text = prompt if isinstance(prompt, str) else await _from_messages(model, prompt)
        tokenizer = await model._get_tokenizer(None)
        found = await model._gen_tokens_prompt(tokenizer, text, {})
    except ValueError:
        raise
    except Exception as error:  # of a chat template, or of a host that has changed
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return list(found["prompt_token_ids"])


async def _from_messages(model: Any, messages: Any) -> Any:
    prepare = getattr(model, "_prepare_chat_inputs", None)
    if prepare is None:
        raise ValueError("the model is not a chat model and takes a text only")
    made, _, context, config = await prepare(copy.deepcopy(list(messages)), {})
    finish = getattr(model, "_prepare_structured_reasoning_prompt", None)
    if finish is not None:
        made = finish(made, config or {}, context)
    if isinstance(made, dict) and made.get("multi_modal_data"):
        raise ValueError("messages with media cannot be looked up")
    return made
