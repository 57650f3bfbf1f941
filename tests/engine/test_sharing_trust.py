"""Who may share with whom: namespaces, launches, secrets, and what a stranger is told."""

from __future__ import annotations

import pickle
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import xoscar as xo
from faults import LENGTH, on_loop, owner_and_reader, quiet
from harness import Replica
from shapes import BLOCK, HYBRID, TP2, Shape
from sharing_cluster import Cluster, ask, member_of, sharing_of, until, usable
from test_bytes import prompt

from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.actors.token import share_token
from xinference_xavier.actors.tracker import find_tracker
from xinference_xavier.engine.settings import SECRET_VARIABLE

pytestmark = quiet

SECRET = bytes.fromhex("ab" * 32)


async def replica_of(owner: Replica) -> Any:
    return await xo.actor_ref(uid=REPLICA_UID, address=owner.connector._bridge.address)


CALLS: dict[str, Callable[[Any, str], Awaitable[Any]]] = {
    "meet": lambda ref, token: ref.meet(token),
    "lease": lambda ref, token: ref.lease(token, "stranger", b"k" * 36, 36, 30.0),
    "release": lambda ref, token: ref.release(token, 1),
    "hear": lambda ref, token: ref.hear(token, []),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_stranger_is_told_nothing(
    quick_cluster: Cluster, call: Callable[[Any, str], Awaitable[Any]]
) -> None:
    owner, reader = owner_and_reader(quick_cluster, TP2)
    token = sharing_of(owner).token
    scope = sharing_of(owner)._setup.entry["scope"]
    assert scope is not None
    assert token == share_token(SECRET, scope)
    for wrong in ("", token[:-1], "0" * 64, scope, share_token(bytes(32), scope)):

        async def knock(wrong: str = wrong) -> Any:
            return await call(await replica_of(owner), wrong)

        with pytest.raises(PermissionError) as refusal:
            on_loop(reader, knock)
        text = repr(refusal.value.args)
        assert token not in text
        assert scope not in text
    assert len(owner.manager.leases) == 0
    assert owner.manager.leases.granted == 0


def test_the_tracker_shows_no_secret(quick_cluster: Cluster) -> None:
    owner, _ = owner_and_reader(quick_cluster, TP2)

    async def everything() -> str:
        tracker = await find_tracker(quick_cluster.tracker.address)
        assert tracker is not None
        return repr(pickle.loads(await tracker.replicas()))

    shown = on_loop(owner, everything)
    assert member_of(owner) in shown
    for hidden in (SECRET.hex(), repr(SECRET), sharing_of(owner).token):
        assert hidden not in shown
    for tier in sharing_of(owner)._setup.tiers:
        assert tier.uid not in shown


def strangers(cluster: Cluster, first: Replica, second: Replica) -> None:
    """Neither can read from the other, nor knows what it holds."""
    ask(first, prompt(1, LENGTH))
    ask(second, prompt(2, LENGTH))
    time.sleep(0.5)  # ten heartbeats
    for each in (first, second):
        assert usable(each) == ()
        assert not sharing_of(each).longest(tuple(second.manager.keys()), 0)[1]
    assert ask(second, prompt(1, LENGTH)).cached == 0
    assert ask(first, prompt(2, LENGTH)).cached == 0
    assert first.manager.fetching.fetches == second.manager.fetching.fetches == 0
    assert first.manager.leases.granted == second.manager.leases.granted == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(TP2, model_uid="other"),
        replace(TP2, model_uid="other", options={"xavier_share": "cluster"}),
        HYBRID,
        replace(HYBRID, options={"xavier_share": "cluster"}),
    ],
    ids=["launch", "one side allows all", "namespace", "namespace in the cluster"],
)
def test_other_scopes_do_not_share(quick_cluster: Cluster, other: Shape) -> None:
    cluster = other.options.get("xavier_share") == "cluster" and other.layers == HYBRID.layers
    first = quick_cluster.add(replace(TP2, options={"xavier_share": "cluster"}) if cluster else TP2)
    second = quick_cluster.add(other)
    strangers(quick_cluster, first, second)
    assert sharing_of(first).peers.entries() == []  # type: ignore[union-attr]


def test_launches_share_if_both_allow_it(quick_cluster: Cluster) -> None:
    allowing = replace(TP2, options={"xavier_share": "cluster"})
    first = quick_cluster.add(allowing)
    second = quick_cluster.add(replace(allowing, model_uid="other"))
    quick_cluster.acquaint()
    ask(first, prompt(1, LENGTH))
    quick_cluster.settle()
    assert ask(second, prompt(1, LENGTH)).cached == 5 * BLOCK


def test_other_secrets_do_not_share(
    quick_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one scope by accident: the token is what counts."""
    first = quick_cluster.add(TP2)
    monkeypatch.setenv(SECRET_VARIABLE, "cd" * 32)
    second = quick_cluster.add(TP2)
    until(lambda: all(failing(each) for each in (first, second)), "both to be refused")
    strangers(quick_cluster, first, second)
    assert caplog.text.count("cannot be read from") == 2
    for secret in ("ab" * 32, "cd" * 32, sharing_of(first).token, sharing_of(second).token):
        assert secret not in caplog.text


def failing(replica: Replica) -> bool:
    peers = sharing_of(replica).peers
    return peers is not None and any(peer.failures for peer in peers._peers.values())


def test_a_replica_without_a_secret_shares_nothing(
    quick_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quick_cluster.add(TP2)
    monkeypatch.delenv(SECRET_VARIABLE)
    monkeypatch.setattr("sharing_cluster.WAIT_SECONDS", 1.0)
    with pytest.raises(AssertionError, match="the bridge to share"):
        quick_cluster.add(TP2)
    assert usable(first) == ()
