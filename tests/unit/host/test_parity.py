"""Who shares with whom, and the sentence or field that says why not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("xinference")

from xinference_xavier.host.parity import ShareView, share_view

SAME = {"dtype": "float32", "hash_seed": "1"}


def entry(
    uid: str,
    replica: int,
    scope: str | None,
    namespace: dict[str, str] | None = None,
    share: str = "model",
    problem: str | None = None,
) -> dict[str, Any]:
    found = {
        "member": f"{uid}{replica}",
        "scope": scope,
        "problem": problem,
        "namespace": SAME if namespace is None else namespace,
        "machine": "here",
    }
    return {
        "model_uid": uid,
        "replica": replica,
        "options": {"xavier_share": share},
        "share": found,
    }


def view(entries: list[dict[str, Any]]) -> ShareView:
    found = share_view(entries[0], entries)
    assert found is not None
    return found


def test_replicas_of_one_scope_share() -> None:
    found = view([entry("m", 0, "s"), entry("m", 1, "s"), entry("n", 0, "t")])
    assert [(peer.model_uid, peer.replica) for peer in found.shares_with] == [("m", 1)]
    assert found.not_with == []


def test_the_field_that_differs_is_named_with_both_values() -> None:
    other = entry("m", 1, "t", {"dtype": "bfloat16", "hash_seed": "1", "rope": "x"})
    (difference,) = view([entry("m", 0, "s"), other]).not_with
    assert difference.fields == {"dtype": ("float32", "bfloat16"), "rope": (None, "x")}
    assert difference.reason is None


def test_other_models_are_named_only_where_both_share_with_the_cluster() -> None:
    far = entry("n", 0, "t", {"dtype": "bfloat16"}, share="cluster")
    assert view([entry("m", 0, "s"), far]).not_with == []
    (difference,) = view([entry("m", 0, "s", share="cluster"), far]).not_with
    assert difference.model_uid == "n"
    assert set(difference.fields) == {"dtype", "hash_seed"}


@pytest.mark.parametrize(
    ("problem", "words"), [("xavier_share=off: alone", "alone"), (None, "differs between")]
)
def test_a_reason_without_a_field(problem: str | None, words: str) -> None:
    other = entry("m", 1, None if problem else "t", problem=problem)
    (difference,) = view([entry("m", 0, "s"), other]).not_with
    assert difference.fields == {}
    assert words in str(difference.reason)


def test_an_engine_that_starts_has_no_verdict() -> None:
    starting = {**entry("m", 0, "s"), "share": None}
    assert share_view(starting, [starting]) is None
    assert view([entry("m", 1, "s"), starting]).shares_with == []
