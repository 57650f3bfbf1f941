"""Whatever a launch's options are, they are taken or refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.config import OPTIONS, SWITCH
from xinference_xavier.host.options import check_payload, validate_launch
from xinference_xavier.types import OptionError

#: Other arguments that our checks read.
READ = (
    "block_size",
    "data_parallel_size",
    "dtype",
    "enable_prefix_caching",
    "enable_virtual_env",
    "enable_weight_cache",
    "enable_xavier",
    "envs",
    "kv_cache_dtype",
    "kv_offloading_size",
    "kv_transfer_config",
    "model_engine",
    "model_path",
    "model_type",
    "prefix_caching_hash_algo",
    "replica_config",
    "tensor_parallel_size",
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**309, -(10**309)])  # beyond any float
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["4GiB", "auto", "-1", "1e400", "model", "lru", "\ud800", "a\0b", "/"])
)
VALUES = st.recursive(
    SCALARS,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=9), each, max_size=3)
    ),
    max_leaves=5,
)


def any_of(names: Iterable[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, VALUES))


def judge(arguments: dict[str, Any]) -> None:
    launch = {**arguments, SWITCH: True}
    for check in (check_payload, validate_launch):
        try:
            options, _ = check(launch)
        except OptionError as error:
            sentence = str(error)
            assert any(name in sentence for name in launch), sentence
            assert ". " in sentence
            assert len(sentence) < 300 * len(launch)
        else:
            assert options is not None


@given(any_of(OPTIONS))
def test_any_options_are_taken_or_refused_in_a_sentence(arguments: dict[str, Any]) -> None:
    judge(arguments)


@given(any_of(READ))
def test_so_are_any_arguments_of_the_host_beside_them(arguments: dict[str, Any]) -> None:
    judge(arguments)
