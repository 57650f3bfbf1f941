"""The launch options: one frozen model, parsed once.

Covers: names, defaults, meaning and the check of each value by itself, wherever it was given (CLI,
REST, Python client, web UI). Does not cover: conflicts with other launch arguments and with the
machine (``host/options.py``, ``host/sizing.py``). Plain functions, any process and thread.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from xinference_xavier.types import OptionError

#: The launch option that switches everything on.
SWITCH = "enable_xavier_gpu"

#: How vLLM hashes blocks under this cache: reproducible in every process, unlike its default.
HASH_ALGORITHM = "sha256_cbor"

#: Options of Xinference's own caches, which share our prefix. They pass through untouched.
HOST_OPTIONS = frozenset(
    {
        "enable_xavier",
        "xavier_cache_backend",
        "xavier_cache_backend_config",
        "xavier_cache_bytes",
        "xavier_config",
        "xavier_gpu_cache_bytes",
        "xavier_transfer_block_num",
    }
)

_UNIT_BYTES = {"": 1, "b": 1}
_UNIT_BYTES |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", start=1)}
_UNIT_BYTES |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*([A-Za-z]*)")
_SIZE_REMEDY = "Give whole bytes, or a size such as 512MiB, 4GiB or 8GB (0 switches the tier off)."
#: More than any machine has; keeps absurd values away from arithmetic in 64 bits.
_MAX_SIZE_BYTES = 2**56

#: Values are quoted in errors and logs; a launch payload may hold anything.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def refusal(option: str, value: object, problem: str, remedy: str) -> OptionError:
    """Error whose sentence names option, value and remedy."""
    return OptionError(f"{option}={_SHORT.repr(value)} {problem}. {remedy}")


def parse_size(value: object, option: str = "size") -> int:
    """Bytes of ``value``: an integer, or a string with B, KB..TB (1000) or KiB..TiB (1024).

    Raises:
        OptionError: a boolean, a negative or unbounded number, a fraction of a byte without a
            unit, an unknown unit.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refusal(option, value, "is not a size", _SIZE_REMEDY)
    if isinstance(value, str):
        size = _parse_size_text(value, option)
    elif isinstance(value, int):  # perhaps beyond any float
        size = value
    elif not math.isfinite(value):
        raise refusal(option, value, "is not a finite size", _SIZE_REMEDY)
    elif not value.is_integer():
        raise refusal(option, value, "is not a whole number of bytes", _SIZE_REMEDY)
    else:
        size = int(value)
    if size < 0:
        raise refusal(option, value, "is negative", _SIZE_REMEDY)
    if size > _MAX_SIZE_BYTES:
        raise refusal(option, value, "is more than any machine has", _SIZE_REMEDY)
    return size


def _parse_size_text(value: str, option: str) -> int:
    text = value.strip()
    if text.startswith("-"):
        raise refusal(option, value, "is negative", _SIZE_REMEDY)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise refusal(option, value, "is not a size", _SIZE_REMEDY)
    number, unit = match.groups()
    unit_bytes = _UNIT_BYTES.get(unit.lower())
    if unit_bytes is None:
        raise refusal(option, value, f"has the unknown unit {unit!r}", _SIZE_REMEDY)
    if unit_bytes == 1 and not number.isdigit():
        raise refusal(option, value, "is not a whole number of bytes", _SIZE_REMEDY)
    return int(Decimal(number) * unit_bytes)


def format_size(size_bytes: int) -> str:
    """Shortest exact spelling in binary units, e.g. ``256MiB``; plain bytes otherwise."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


def parse_bool(value: object, option: str) -> bool:
    """A JSON boolean, 0 or 1, or the words true and false in any case.

    Raises:
        OptionError: anything else.
    """
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if isinstance(value, int | str) and word in ("true", "false", "1", "0"):
        return word in ("true", "1")
    raise refusal(option, value, "is not a boolean", "Give true or false.")


def _bool_field(option: str) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_bool(value, option))


def _size_field(option: str) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_size(value, option))


def _cpu_budget(value: object) -> int | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    return parse_size(value, "xavier_cpu_budget")


def _share(value: object) -> object:
    # The CLI of the host and YAML both turn a bare `off` or `false` into a boolean.
    word = "off" if value is False else str(value).strip().lower()
    if word not in ("off", "model", "cluster"):
        raise refusal("xavier_share", value, "is unknown", "Give off, model or cluster.")
    return word


def _number(value: object, option: str, remedy: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError(type(value).__name__)
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise refusal(option, value, "is not a number", remedy) from None
    if not math.isfinite(number):
        raise refusal(option, value, "is not a finite number", remedy)
    return number


def _min_fetch(value: object) -> int | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    remedy = "Give a whole number of tokens, 1 or more, or auto."
    number = _number(value, "xavier_min_fetch", remedy)
    if number < 1 or number != int(number):
        raise refusal("xavier_min_fetch", value, "is not a positive whole number", remedy)
    return int(number)


def _lease_ttl(value: object) -> float:
    remedy = "Give seconds, more than 0 and at most 3600."
    number = _number(value, "xavier_lease_ttl", remedy)
    if not 0 < number <= 3600:
        raise refusal("xavier_lease_ttl", value, "is out of range", remedy)
    return number


def _self_check(value: object) -> float:
    remedy = "Give the share of copies to verify, from 0 (none) to 1 (every one)."
    number = _number(value, "xavier_self_check", remedy)
    if not 0 <= number <= 1:
        raise refusal("xavier_self_check", value, "is out of range", remedy)
    return number


def _policy(value: object) -> object:
    name = r"[A-Za-z_][A-Za-z0-9_]*"
    if isinstance(value, str) and re.fullmatch(
        rf"lru|reuse|{name}(\.{name})*:{name}", value.strip()
    ):
        return value.strip()
    remedy = (
        "Give lru, reuse, or a class of your own as module:Class, e.g. my_package.policies:Lfu."
    )
    raise refusal("xavier_policy", value, "names no eviction policy", remedy)


class XavierOptions(BaseModel):
    """Launch options of one model, validated. Sizes are bytes of one replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_xavier_gpu: Annotated[bool, _bool_field(SWITCH)] = Field(
        default=False,
        description="Keep snapshots of KV blocks in a GPU tier and a CPU tier (vLLM engine).",
    )
    xavier_gpu_budget: Annotated[int, _size_field("xavier_gpu_budget")] = Field(
        default=256 * 1024**2,
        description="Device bytes of one replica, split over its ranks, for retained snapshots: "
        "the window that peers read from. 0 switches the tier off.",
        json_schema_extra={"metavar": "SIZE", "default_text": "256MiB"},
    )
    xavier_cpu_budget: Annotated[int | Literal["auto"], BeforeValidator(_cpu_budget)] = Field(
        default="auto",
        description="Host bytes of one replica. auto is the smaller of twice its KV pool and half "
        "of the memory available to this machine or cgroup, divided by the replicas on it. "
        "0 switches the tier off.",
        json_schema_extra={"metavar": "SIZE|auto"},
    )
    xavier_share: Annotated[Literal["off", "model", "cluster"], BeforeValidator(_share)] = Field(
        default="model",
        description="Who may read the snapshots: off (nobody else), model (the replicas of this "
        "launch) or cluster (any replica with interchangeable bytes).",
        json_schema_extra={"metavar": "off|model|cluster"},
    )
    xavier_min_fetch: Annotated[int | Literal["auto"], BeforeValidator(_min_fetch)] = Field(
        default="auto",
        description="Fewest tokens worth fetching from a peer. auto is the measured break-even.",
        json_schema_extra={"metavar": "TOKENS|auto"},
    )
    xavier_lease_ttl: Annotated[float, BeforeValidator(_lease_ttl)] = Field(
        default=30.0,
        description="Seconds a peer may hold rows.",
        json_schema_extra={"metavar": "SECONDS", "default_text": "30"},
    )
    xavier_policy: Annotated[str, BeforeValidator(_policy)] = Field(
        default="lru",
        description="Eviction policy: lru, reuse, or a class of your own as module:Class.",
        json_schema_extra={"metavar": "NAME"},
    )
    xavier_store_decode: Annotated[bool, _bool_field("xavier_store_decode")] = Field(
        default=True,
        description="Keep the blocks of decoded tokens too, as multi-turn chat wants.",
        json_schema_extra={"metavar": "true|false", "default_text": "true"},
    )
    xavier_self_check: Annotated[float, BeforeValidator(_self_check)] = Field(
        default=0.0,
        description="Share of loads and fetches verified by checksum, from 0 to 1.",
        json_schema_extra={"metavar": "SHARE", "default_text": "0"},
    )
    xavier_receipts: Annotated[bool, _bool_field("xavier_receipts")] = Field(
        default=True,
        description="Say in each response where its prompt tokens came from. false also hides the "
        "host's count of cached tokens.",
        json_schema_extra={"metavar": "true|false", "default_text": "true"},
    )

    @model_validator(mode="after")
    def _some_tier(self) -> XavierOptions:
        if self.xavier_gpu_budget == 0 and self.xavier_cpu_budget == 0:
            raise OptionError(
                "xavier_gpu_budget=0 and xavier_cpu_budget=0 leave no tier to keep snapshots in. "
                f"Give one of them a size, or launch without {SWITCH}."
            )
        return self

    @classmethod
    def from_launch(cls, kwargs: Mapping[str, Any]) -> tuple[XavierOptions | None, dict[str, Any]]:
        """Split launch arguments into our options (None when switched off) and all others.

        Dashes count as underscores, and None counts as not given.

        Raises:
            OptionError: a bad value, an unknown option of our prefix, or options of ours without
                the switch.
        """
        ours, others = _split(kwargs)
        if not parse_bool(ours.get(SWITCH, False), SWITCH):
            _refuse_without_switch(ours)
            return None, others
        try:
            return cls(**ours), others
        except ValidationError as error:
            raise _as_option_error(error) from error


#: Our option names, in the order of the documentation.
OPTIONS = tuple(XavierOptions.model_fields)


def _split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    ours: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in kwargs.items():
        name = str(key).replace("-", "_")
        if name in OPTIONS:
            if value is None:
                continue
            if name in ours and ours[name] != value:
                raise refusal(str(key), value, f"contradicts {ours[name]!r}", "Give it once.")
            ours[name] = value
        elif _is_unknown(name):
            raise refusal(str(key), value, "is no launch option", _suggest(name))
        else:
            others[key] = value
    return ours, others


def _is_unknown(name: str) -> bool:
    return name.startswith(("xavier_", "enable_xavier")) and name not in HOST_OPTIONS


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, [*OPTIONS, *sorted(HOST_OPTIONS)], n=1)
    if close:
        return f"Did you mean {close[0]}?"
    return f"The options are {', '.join(OPTIONS)}."


def _refuse_without_switch(ours: Mapping[str, Any]) -> None:
    for name, value in ours.items():
        if name != SWITCH:
            remedy = f"Add {SWITCH}=true (--enable-xavier-gpu), or drop {name}."
            raise refusal(name, value, f"does nothing without {SWITCH}", remedy)


def _messages(error: ValidationError) -> Iterator[str]:
    for detail in error.errors():
        cause = detail.get("ctx", {}).get("error")
        location = ".".join(str(part) for part in detail["loc"])
        yield str(cause) if cause is not None else f"{location}: {detail['msg']}"


def _as_option_error(error: ValidationError) -> OptionError:
    return OptionError(" ".join(_messages(error)))
