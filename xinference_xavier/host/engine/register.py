"""Putting our engine classes in the place of the host's.

Covers: the hook on ``xinference.engine_hooks`` and the exchange in the engine table. Runs in
every process that imports Xinference's models, before its registry is built.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from types import ModuleType

ENGINE = "vLLM"


def on_engine_hooks(module: ModuleType) -> None:
    """Ask Xinference to call ``replace_classes`` when it builds its engine table."""
    module.register_engine_registration_hook(module.MODEL_TYPE_LLM, replace_classes)


def replace_classes(engines: MutableMapping[str, list[type]]) -> None:
    """Exchange each vLLM class for its subclass of ours; unknown classes stay as they are."""
    from .classes import REPLACEMENTS

    engines[ENGINE] = [REPLACEMENTS.get(cls, cls) for cls in engines.get(ENGINE, [])]
