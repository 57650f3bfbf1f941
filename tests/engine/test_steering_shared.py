"""What an operator does to one of two replicas that share: real tracker, real actors, real NIXL."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import xoscar as xo
from checks import check_step
from faults import LENGTH, both_shapes, on_loop, owner_and_reader, quiet
from harness import Replica
from operator_calls import begin_resize, finish_changes, steer, steering_of
from shapes import BLOCK, TP2, Shape
from sharing_cluster import Cluster, ask, finish, member_of, sharing_of, until
from test_bytes import prompt

from xinference_xavier.actors.replica import REPLICA_UID
from xinference_xavier.policy.columns import ZOMBIE

pytestmark = quiet


def locations(replica: Replica) -> list[int]:
    keys = replica.manager.keys()
    return [replica.manager.index.where(key) for key in keys]


def lease_all(owner: Replica, reader: Replica) -> int:
    """A lease of everything that the owner holds, in the reader's name; its number."""
    keys = list(owner.manager.keys())
    lease_id, found = on_loop(owner, lambda: sharing_of(owner).lease(member_of(reader), keys, 30.0))
    assert all(location > -(2**61) for location in found), "every key is leased"
    return int(lease_id)


def release(owner: Replica, lease_id: int) -> bool:
    return bool(on_loop(owner, lambda: sharing_of(owner).release(lease_id)))


def zombies(replica: Replica) -> int:
    index = replica.manager.index
    return index.gpu.counts[ZOMBIE] + index.cpu.counts[ZOMBIE]


def bytes_of(owner: Replica, locations: list[int]) -> list[bytes]:
    copier = owner.ranks[0].copier.inner
    return [copier._memories[0 if at >= 0 else 1][max(at, ~at)].tobytes() for at in locations]


def call(replica: Replica, method: str, *arguments: Any) -> Any:
    """A call to the replica's actor, as the API makes it, while nothing else steps it."""
    address = replica.connector._bridge.address

    async def run() -> Any:
        ref = await xo.actor_ref(uid=REPLICA_UID, address=address)
        return await getattr(ref, method)(*arguments)

    future = asyncio.run_coroutine_threadsafe(run(), sharing_of(replica)._loop)
    deadline = time.monotonic() + 20
    while not future.done():
        assert time.monotonic() < deadline
        replica.step()
        time.sleep(0.001)
    return future.result()


@both_shapes
def test_a_clear_leaves_what_is_leased_until_it_is_released(
    quick_cluster: Cluster, shape: Shape
) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    leased = locations(owner)
    lease_id = lease_all(owner, reader)
    held = bytes_of(owner, leased)
    answer = call(owner, "clear")
    assert answer == {"removed_now": 0, "removed_later": len(leased)}
    assert zombies(owner) == len(leased)
    quick_cluster.settle()  # the reader knows that nothing is there
    for number in range(2, 8):  # everything else is written over and over
        ask(owner, prompt(number, LENGTH))
    assert bytes_of(owner, leased) == held, "a peer may still read the rows"
    assert release(owner, lease_id), "the lease held: what was read counts"
    assert zombies(owner) == 0
    check_step(owner)
    quick_cluster.settle()
    assert ask(reader, prompt(1, LENGTH)).cached == 0
    assert ask(reader, prompt(7, LENGTH)).cached == LENGTH - 1


@both_shapes
def test_a_tier_shrinks_around_leases(quick_cluster: Cluster, shape: Shape) -> None:
    owner, reader = owner_and_reader(quick_cluster, shape)
    leased = [at for at in locations(owner) if at >= 0]
    lease_id = lease_all(owner, reader)
    held = bytes_of(owner, leased)
    size = owner.manager.rank_row_bytes * owner.manager.ranks
    answer = call(owner, "resize", size, None, 0.1)
    assert answer["gpu"]["state"] == "draining"
    assert answer["gpu"]["rows_leaving"] == len([at for at in leased if at >= 1])
    for number in range(2, 8):
        ask(owner, prompt(number, LENGTH))
    assert bytes_of(owner, leased) == held
    assert release(owner, lease_id)
    finish_changes(owner)
    assert owner.manager.index.gpu.rows == 1
    check_step(owner)
    quick_cluster.settle()
    assert ask(reader, prompt(7, LENGTH)).cached == LENGTH - 1


@both_shapes
def test_peers_read_rows_that_came_later(quick_cluster: Cluster, shape: Shape) -> None:
    """Without meeting anew: the address space was theirs from the start."""
    small = replace(shape, gpu_rows=4, cpu_rows=0)
    owner, reader = quick_cluster.pair(small)
    for each in (owner, reader):
        begin_resize(each, gpu=48)
        finish_changes(each)
    ask(owner, prompt(1, 9 * BLOCK + 1))
    quick_cluster.settle()
    assert max(locations(owner)) >= 8
    found = steering_of(reader)._find(prompt(1, 9 * BLOCK + 1), None)
    assert found["peer"] == found["prefix"] == 9 * BLOCK
    assert ask(reader, prompt(1, 9 * BLOCK + 1)).cached == 9 * BLOCK
    assert not reader.manager.fetching.failures
    assert reader.counters.fetched >= 9


def test_rows_that_went_are_no_rows_of_a_lease(quick_cluster: Cluster) -> None:
    """What the reader still believes is a miss, and is computed."""
    owner, reader = owner_and_reader(quick_cluster, TP2)
    begin_resize(owner, gpu=1, cpu=1)
    finish_changes(owner)
    asked = ask(reader, prompt(1, LENGTH))
    assert asked.finished == "length"
    until(lambda: owner.manager.leases.rows == 0, "no lease to be left")
    check_step(reader)
    check_step(owner)


def test_an_operator_is_answered_through_the_actor(quick_cluster: Cluster) -> None:
    owner, _ = owner_and_reader(quick_cluster, TP2)
    assert call(owner, "pause_stores", True) == {"paused": True}
    ask(owner, prompt(2, LENGTH))
    assert owner.connector._stats.collect()["skips"]["paused"] == 5
    assert owner.connector._stats.collect()["stores_paused"] is True
    assert call(owner, "lookup", prompt(1, LENGTH), None)["engine"] == LENGTH - 1
    with pytest.raises(ValueError, match="xavier_gpu_budget=1 is below one row"):
        call(owner, "resize", 1, None, 1.0)
    size = owner.manager.rank_row_bytes * owner.manager.ranks
    call(owner, "resize", 20 * size, None, 10.0)
    assert owner.connector._stats.collect()["tiers"]["gpu"]["budget_bytes"] == 20 * size


def test_a_clear_while_a_fetch_is_on_its_way(quick_cluster: Cluster) -> None:
    owner, reader = owner_and_reader(quick_cluster, TP2)
    asked = reader.ask(prompt(1, LENGTH))
    assert reader.manager.planner.fetches.flying == 1
    answer = steer(reader, lambda s: s.clear())
    finish(reader)
    assert answer["removed_later"] <= 5
    assert reader.asked[asked].finished == "length"
    check_step(reader)
    assert owner.manager.leases.rows == 0
