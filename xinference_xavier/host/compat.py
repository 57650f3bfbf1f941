"""Every private or undocumented symbol of Xinference that this package touches.

Covers: their names as data, and checks that they still exist. Does not cover: vLLM's symbols
(``engine/compat.py``). The check of one module runs right after that module was imported, in
whichever process imports it; a hook whose symbols are gone stays inactive.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class HostSymbol:
    """One symbol. ``path`` is dotted inside ``module``.

    ``instance`` marks the last part of ``path`` as an attribute that methods of the class set, so
    it is looked for in their code rather than on the class. Without one that is not ``needed``
    only what ``why`` says does not work.
    """

    module: str
    path: str
    why: str
    instance: bool = False
    needed: bool = True

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"


SYMBOLS = (
    HostSymbol(
        "xinference.engine_hooks",
        "register_engine_registration_hook",
        "registers the engine classes before the model registry is built",
    ),
    HostSymbol(
        "xinference.engine_hooks",
        "_ENGINE_REGISTRATION_HOOKS",
        "read by `xinference-xavier doctor` to see our hook",
    ),
    HostSymbol(
        "xinference.api.routers",
        "register_all_routes",
        "wrapped, so that our routes precede the catch-all route of the web UI",
    ),
    HostSymbol(
        "xinference.api.restful_api",
        "RESTfulAPI._app",
        "the application that our routes join",
        instance=True,
    ),
    HostSymbol(
        "xinference.api.restful_api",
        "RESTfulAPI._router",
        "the router whose launch routes get our validation as a dependency",
        instance=True,
    ),
    HostSymbol(
        "xinference.api.restful_api",
        "RESTfulAPI._auth_service",
        "authenticates calls to our routes",
        instance=True,
    ),
    HostSymbol(
        "xinference.api.restful_api",
        "RESTfulAPI._get_supervisor_ref",
        "reaches the supervisor that knows the running models",
    ),
    HostSymbol(
        "xinference.api.restful_api",
        "RESTfulAPI._supervisor_address",
        "where the tracker actor lives",
        instance=True,
    ),
    HostSymbol(
        "xinference.api.restful_api",
        "RESTfulAPI.is_authenticated",
        "whether our routes need credentials",
    ),
    HostSymbol(
        "xinference.constants",
        "XINFERENCE_ENABLE_VIRTUAL_ENV",
        "whether a model runs with a vLLM of its own when the launch does not say",
    ),
    HostSymbol(
        "xinference.deploy.cmdline",
        "cli",
        "its `launch` command gets our options",
    ),
    HostSymbol(
        "xinference.deploy.cmdline",
        "handle_click_args_type",
        "how the CLI reads the extra arguments we append",
    ),
    HostSymbol(
        "xinference.constants",
        "XINFERENCE_AUTH_DIR",
        "where `xinference login` keeps its tokens",
        needed=False,
    ),
    HostSymbol(
        "xinference.deploy.cmdline",
        "get_hash_endpoint",
        "finds the token that `xinference login` has kept for our commands",
        needed=False,
    ),
    HostSymbol(
        "xinference.core.supervisor",
        "SupervisorActor.get_model",
        "finds a model whose prompt is looked up",
        needed=False,
    ),
    HostSymbol(
        "xinference.client.restful.restful_client",
        "Client.launch_model",
        "its local `response` tells the CLI that the server refused a launch",
    ),
    HostSymbol(
        "xinference.core.supervisor",
        "SupervisorActor.__post_create__",
        "wrapped, so that the tracker is made beside the supervisor",
    ),
    HostSymbol(
        "xinference.core.supervisor",
        "SupervisorActor.control_address",
        "where the supervisor makes the actors beside it",
    ),
    HostSymbol(
        "xinference.core.model",
        "ModelActor.__init__",
        "wrapped, so that a model process learns its addresses",
    ),
    HostSymbol(
        "xinference.core.utils",
        "parse_replica_model_uid",
        "tells the replica's number from its name",
    ),
    HostSymbol(
        "xinference.core.supervisor",
        "SupervisorActor.get_instance_info",
        "asked how many replicas share a machine, and which models run",
    ),
    HostSymbol("xinference.model.llm.vllm.core", "VLLMModel", "extended for completion models"),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel.load",
        "where the hash seed is set and the replica announces itself",
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel.wait_for_load",
        "ends when the engine runs",
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel._loop",
        "the event loop of the model process, to reach actors from the loading thread",
        instance=True,
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel._sanitize_model_config",
        "where launch options become vLLM engine arguments",
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel._get_tokenizer",
        "turns a prompt that is looked up into tokens",
        needed=False,
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel._gen_tokens_prompt",
        "turns a prompt that is looked up into tokens",
        needed=False,
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMChatModel._prepare_chat_inputs",
        "turns messages that are looked up into a prompt",
        needed=False,
    ),
    HostSymbol(
        "xinference.core.model",
        "ModelActor.__getattr__",
        "lets the API ask the model for the tokens of a prompt",
        needed=False,
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel._track_engine_request",
        "where a request's outputs get its receipt",
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel._get_completion_usage",
        "extended with the receipt, for streams",
    ),
    HostSymbol(
        "xinference.model.llm.vllm.core",
        "VLLMModel._convert_request_output_to_completion",
        "the same for other responses",
    ),
    HostSymbol(
        "xinference.model.llm.utils",
        "ChatModelMixin._sanitize_usage",
        "kept from dropping the receipt",
    ),
    HostSymbol("xinference.model.llm.vllm.core", "VLLMChatModel", "extended for chat models"),
    HostSymbol("xinference.model.llm.vllm.core", "VLLMMultiModel", "extended for vision models"),
    HostSymbol(
        "xinference.deploy.api_worker",
        "HostedServer.begin_drain",
        "wrapped, so that an open panel delays neither the server's end nor an API relaunch",
    ),
)


class HostChangedError(RuntimeError):
    """The installed Xinference lacks symbols that this package needs."""

    def __init__(self, missing: list[HostSymbol]) -> None:
        self.missing = missing
        listed = "; ".join(f"{symbol} ({symbol.why})" for symbol in missing)
        super().__init__(
            f"the installed Xinference has changed and lacks {listed}. Install a version that "
            "`xinference-xavier doctor` lists as supported, or a newer xinference-xavier"
        )


def missing_in(module: ModuleType) -> list[HostSymbol]:
    """Needed symbols of one imported module that are gone. Imports nothing."""
    needed = (s for s in SYMBOLS if s.needed and s.module == module.__name__)
    return [s for s in needed if not _exists(s, module)]


def missing() -> list[HostSymbol]:
    """All symbols that are gone. Imports the host's modules, which takes seconds."""
    found: list[HostSymbol] = []
    for symbol in SYMBOLS:
        try:
            module = import_module(symbol.module)
        except ImportError:
            found.append(symbol)
            continue
        if not _exists(symbol, module):
            found.append(symbol)
    return found


def missing_on(instance: Any) -> list[HostSymbol]:
    """Instance attributes of ``type(instance)`` that ``instance`` lacks."""
    owner = type(instance)
    return [
        symbol
        for symbol in SYMBOLS
        if symbol.module == owner.__module__
        and symbol.path.partition(".")[0] == owner.__name__
        and not hasattr(instance, symbol.path.partition(".")[2])
    ]


def _exists(symbol: HostSymbol, module: ModuleType) -> bool:
    parts = symbol.path.split(".")
    last = parts.pop() if symbol.instance else None
    owner: Any = module
    for part in parts:
        owner = getattr(owner, part, None)
        if owner is None:
            return False
    return last is None or hasattr(owner, last) or _sets_attribute(owner, last)


def _sets_attribute(owner: type, attribute: str) -> bool:
    """True when a method of ``owner`` or of a base names ``attribute``."""
    for cls in owner.__mro__:
        for member in vars(cls).values():
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None and attribute in code.co_names:
                return True
    return False
