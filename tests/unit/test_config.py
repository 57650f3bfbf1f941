"""Launch options by themselves: sizes, booleans, defaults, unknown names."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from xinference_xavier.config import (
    HOST_OPTIONS,
    OPTIONS,
    SWITCH,
    XavierOptions,
    format_size,
    parse_bool,
    parse_size,
)
from xinference_xavier.types import OptionError

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def launch(**kwargs: object) -> XavierOptions:
    options, others = XavierOptions.from_launch({SWITCH: True, **kwargs})
    assert options is not None
    assert others == {}
    return options


def refusal_of(**kwargs: object) -> str:
    with pytest.raises(OptionError) as caught:
        XavierOptions.from_launch(kwargs)
    return str(caught.value)


@given(st.integers(0, 2**44))
def test_integers_and_their_texts_are_bytes(size_bytes: int) -> None:
    assert parse_size(size_bytes) == size_bytes
    assert parse_size(str(size_bytes)) == size_bytes
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 4000), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_every_unit_in_any_case(number: int, unit: str, gap: str) -> None:
    for spelling in (unit, unit.lower(), unit.upper()):
        assert parse_size(f"{number}{gap}{spelling}") == number * UNITS[unit]


def test_fractions_need_a_unit() -> None:
    assert parse_size("1.5GiB") == 3 * 2**29
    assert parse_size(".5 kb") == 500
    assert parse_size("1.1GB") == 1_100_000_000
    assert parse_size(1e9) == 10**9  # what the host's CLI makes of the text 1e9
    for value in ("1.5", "1.5B", 1.5):
        with pytest.raises(OptionError, match="whole number of bytes"):
            parse_size(value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (True, "is not a size"),
        (None, "is not a size"),
        ([1], "is not a size"),
        ("", "is not a size"),
        ("auto", "is not a size"),
        ("4GiB/s", "is not a size"),
        ("1_000", "is not a size"),
        ("9" * 5000, "is not a size"),
        ("0x10", "is not a size"),
        (-1, "is negative"),
        ("-4GiB", "is negative"),
        (math.nan, "is not a finite size"),
        (math.inf, "is not a finite size"),
        ("nan", "is not a size"),
        ("4XB", "unknown unit 'XB'"),
        ("4G", "unknown unit 'G'"),
        (2**60, "more than any machine has"),
        (10**400, "more than any machine has"),
        (-(10**400), "is negative"),
        ("99999TiB", "more than any machine has"),
    ],
)
def test_bad_sizes_name_option_value_and_remedy(value: object, problem: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(value, "xavier_gpu_budget")
    sentence = str(caught.value)
    assert sentence.startswith("xavier_gpu_budget=")
    assert problem in sentence
    assert "512MiB" in sentence
    assert len(sentence) < 300, "a huge value must not flood the error"


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_an_option_error(text: str) -> None:
    try:
        size_bytes = parse_size(text)
    except OptionError:
        return
    assert size_bytes >= 0


def test_booleans() -> None:
    assert [parse_bool(v, "x") for v in (True, "true", "True", 1, "1")] == [True] * 5
    assert [parse_bool(v, "x") for v in (False, "false", "FALSE", 0, "0")] == [False] * 5
    for value in ("yes", 2, 1.0, None, [], ""):
        with pytest.raises(OptionError, match="Give true or false"):
            parse_bool(value, "x")


def test_defaults() -> None:
    assert launch().model_dump() == {
        "enable_xavier_gpu": True,
        "xavier_gpu_budget": 256 * 2**20,
        "xavier_cpu_budget": "auto",
        "xavier_share": "model",
        "xavier_min_fetch": "auto",
        "xavier_lease_ttl": 30.0,
        "xavier_policy": "lru",
        "xavier_store_decode": True,
        "xavier_self_check": 0.0,
        "xavier_receipts": True,
    }


def test_values_as_the_cli_sends_them() -> None:
    options = launch(
        xavier_gpu_budget="1GiB",
        xavier_cpu_budget="AUTO",
        xavier_share=False,  # the host's CLI reads neither off nor no, but YAML does
        xavier_min_fetch="64",
        xavier_lease_ttl="2.5",
        xavier_policy="my.policies:Lfu",
        xavier_store_decode="false",
        xavier_self_check="0.001",
    )
    assert options.xavier_gpu_budget == 2**30
    assert options.xavier_cpu_budget == "auto"
    assert options.xavier_share == "off"
    assert options.xavier_min_fetch == 64
    assert options.xavier_lease_ttl == 2.5
    assert options.xavier_policy == "my.policies:Lfu"
    assert options.xavier_store_decode is False
    assert options.xavier_self_check == 0.001


def test_options_survive_a_dump_and_are_frozen() -> None:
    options = launch(xavier_cpu_budget="2GiB")
    assert XavierOptions(**options.model_dump()) == options
    with pytest.raises(ValidationError):
        options.xavier_gpu_budget = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("xavier_gpu_budget", "auto"),
        ("xavier_cpu_budget", "lots"),
        ("xavier_share", "all"),
        ("xavier_min_fetch", 0),
        ("xavier_min_fetch", 1.5),
        ("xavier_min_fetch", "few"),
        ("xavier_lease_ttl", 0),
        ("xavier_lease_ttl", -1),
        ("xavier_lease_ttl", 1e9),
        ("xavier_lease_ttl", "nan"),
        ("xavier_lease_ttl", True),
        ("xavier_policy", "fifo"),
        ("xavier_policy", "module:"),
        ("xavier_policy", 7),
        ("xavier_store_decode", "maybe"),
        ("xavier_self_check", 1.01),
        ("xavier_self_check", "inf"),
        ("xavier_self_check", {}),
    ],
)
def test_bad_values_are_named(option: str, value: object) -> None:
    sentence = refusal_of(**{SWITCH: True, option: value})
    assert sentence.startswith(f"{option}={value!r} ")
    assert ". Give " in sentence


def test_a_value_unequal_to_itself_is_named() -> None:
    with pytest.raises(OptionError, match=r"xavier_cpu_budget=nan is not a finite size"):
        XavierOptions.from_launch({SWITCH: True, "xavier_cpu_budget": math.nan})


def test_all_bad_values_are_named_at_once() -> None:
    sentence = refusal_of(enable_xavier_gpu=True, xavier_gpu_budget=-1, xavier_share="x")
    assert "xavier_gpu_budget=-1" in sentence
    assert "xavier_share='x'" in sentence


def test_no_tier_at_all_is_refused() -> None:
    sentence = refusal_of(enable_xavier_gpu=True, xavier_gpu_budget=0, xavier_cpu_budget="0B")
    assert "xavier_gpu_budget=0 and xavier_cpu_budget=0" in sentence
    assert launch(xavier_gpu_budget=0).xavier_gpu_budget == 0
    assert launch(xavier_cpu_budget=0).xavier_cpu_budget == 0


def test_a_launch_without_our_options_is_untouched() -> None:
    kwargs = {"max_model_len": 8, "enable-x": 1, "prefix": None, "_xavier_cache_config": {}}
    assert XavierOptions.from_launch(kwargs) == (None, kwargs)
    assert XavierOptions.from_launch({SWITCH: False, **kwargs}) == (None, kwargs)
    assert XavierOptions.from_launch({SWITCH: None, **kwargs}) == (None, kwargs)


def test_host_options_pass_through() -> None:
    kwargs = dict.fromkeys(HOST_OPTIONS, 1) | {"xavier-cache-bytes": 2}
    assert XavierOptions.from_launch(kwargs) == (None, kwargs)
    options, others = XavierOptions.from_launch({SWITCH: True, **kwargs})
    assert options is not None
    assert others == kwargs


def test_budgets_without_the_switch_are_refused() -> None:
    for switch in ({}, {SWITCH: False}, {SWITCH: "false"}):
        sentence = refusal_of(**switch, xavier_gpu_budget="1GiB")
        assert "does nothing without enable_xavier_gpu" in sentence
        assert "--enable-xavier-gpu" in sentence


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("xavier_gpu_bugdet", "xavier_gpu_budget"),
        ("xavier-gpu-bugdet", "xavier_gpu_budget"),
        ("xavier_cpu_buget", "xavier_cpu_budget"),
        ("enable-xavier-gpus", "enable_xavier_gpu"),
        ("xavier_cache_byte", "xavier_cache_bytes"),
    ],
)
def test_typos_are_refused_with_the_closest_name(typo: str, meant: str) -> None:
    for switch in ({}, {SWITCH: True}):
        sentence = refusal_of(**switch, **{typo: 1})
        assert sentence == f"{typo}=1 is no launch option. Did you mean {meant}?"


def test_a_name_like_no_other_lists_the_options() -> None:
    sentence = refusal_of(xavier_zzzzzzzzzzzzzzzzzzzzzzzzz=1)
    assert all(option in sentence for option in OPTIONS)


def test_dashes_count_as_underscores() -> None:
    assert launch(**{"xavier-gpu-budget": 5}).xavier_gpu_budget == 5
    sentence = refusal_of(**{SWITCH: True, "xavier-share": "off", "xavier_share": "model"})
    assert sentence == "xavier_share='model' contradicts 'off'. Give it once."


def test_none_counts_as_not_given() -> None:
    assert launch(xavier_gpu_budget=None, xavier_share=None) == launch()
    assert XavierOptions.from_launch({"xavier_gpu_budget": None}) == (None, {})


def test_unknown_fields_are_forbidden_in_the_model() -> None:
    with pytest.raises(ValidationError):
        XavierOptions(xavier_colour="blue")  # type: ignore[call-arg]
