"""Replays a trace through the policy: the planner and the index of one or several replicas.

Copies succeed at once. Replicas know at any time what the others hold; that is the one thing that
is better here than in service, where a mirror follows after tens of milliseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

from benchmarks.traces import Trace
from xinference_xavier.policy.index import Found, SnapshotIndex
from xinference_xavier.policy.leases import NOT_NOW, Leases
from xinference_xavier.policy.order import OrderFactory
from xinference_xavier.policy.planner import Planner, default_low_water

GROUP = (0).to_bytes(4, "big")
LEASE_SECONDS = 30.0


def key_of(block: int) -> bytes:
    return block.to_bytes(32, "big") + GROUP


class Replica:
    """The policy of one replica.

    Args:
        gpu_rows: rows of the GPU tier; may be 0.
        cpu_rows: rows of the CPU tier; may be 0.
        order: the eviction order.
    """

    def __init__(self, gpu_rows: int, cpu_rows: int, order: OrderFactory) -> None:
        self.index = SnapshotIndex(gpu_rows, cpu_rows, order)
        self.planner = Planner(self.index, default_low_water(gpu_rows, 1))
        self.leases = Leases(self.index)

    def run(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many keys from ``start`` on are here without a gap."""
        found = (self.index.lookup(key) is Found.HIT for key in keys[start:])
        return sum(takewhile(bool, found))

    def serve(self, keys: Sequence[bytes], mark: int, peers: Sequence[Replica] = ()) -> int:
        """One request: read what is cached, here and at peers, and store the rest.

        Returns how many of its blocks were found as a prefix.
        """
        planner, hits = self.planner, self.run(keys)
        held = []
        for peer in sorted(peers, key=lambda peer: -peer.run(keys, hits)):
            fetch = self._fetch(keys, hits, mark, peer)
            if fetch is not None:
                held.append(fetch)
                hits += self.run(keys, hits)
        load = planner.pin_for_load(keys[:hits], mark)
        for fetch in held:
            planner.fetches.release(fetch)
        planner.finish_load(load)
        planner.commit_store(planner.admit(keys[hits:], mark, set()), ok=True)
        planner.retire(keys, mark)
        for move in planner.plan_moves((mark,)):
            planner.commit_move(move, ok=True)
        return hits

    def _fetch(self, keys: Sequence[bytes], start: int, mark: int, peer: Replica) -> int | None:
        """Read what ``peer`` has from ``start`` on, under a lease; the fetch's number."""
        wanted = keys[start : start + peer.run(keys, start)]
        plan = self.planner.plan_fetch(wanted, mark) if wanted else None
        if plan is None:
            return None
        lease = peer.leases.open("replica", 0.0, LEASE_SECONDS)
        granted = peer.leases.extend(lease, plan.keys)
        failed = [position for position, at in enumerate(granted) if at <= NOT_NOW]
        peer.leases.release(lease)
        self.planner.fetches.commit(plan.fetch_id, failed)
        return plan.fetch_id


def replay(trace: Trace, rows: int, order: OrderFactory, gpu_share: float = 0.0) -> float:
    """Share of blocks found as a prefix by one replica with ``rows`` rows."""
    return replay_replicas(trace, 1, rows, order, aware=False, gpu_share=gpu_share)


def replay_replicas(
    trace: Trace, replicas: int, rows: int, order: OrderFactory, aware: bool, gpu_share: float = 0.0
) -> float:
    """The same of ``replicas`` with ``rows`` rows each, which take requests in turns.

    With ``aware`` what a peer also holds goes before a last copy.
    """
    gpu_rows = int(rows * gpu_share)
    all_ = [Replica(gpu_rows, rows - gpu_rows, order) for _ in range(replicas)]
    others = [[peer for peer in all_ if peer is not replica] for replica in all_]
    if aware:
        for replica, peers in zip(all_, others, strict=True):
            replica.index.held_elsewhere = partial(_held, [peer.index for peer in peers])
    hits = 0
    for number, blocks in enumerate(trace):
        turn = number % replicas
        hits += all_[turn].serve([key_of(block) for block in blocks], number + 1, others[turn])
    for replica in all_:
        replica.index.validate()
    return hits / max(1, sum(map(len, trace)))


def _held(indexes: Sequence[SnapshotIndex], key: bytes) -> bool:
    return any(key in index for index in indexes)


def belady(trace: Trace, rows: int) -> float:
    """The same of a cache that knows the future: what is needed last, or never, goes first."""
    never = sum(map(len, trace))
    next_use: list[list[int]] = []
    coming: dict[int, int] = {}
    for number in range(len(trace) - 1, -1, -1):
        next_use.append([coming.get(block, never) for block in trace[number]])
        coming.update(dict.fromkeys(trace[number], number))
    next_use.reverse()
    cached: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []  # also entries that are out of date
    hits = 0
    for blocks, uses in zip(trace, next_use, strict=True):
        hits += sum(takewhile(bool, (block in cached for block in blocks)))
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            cached[block] = use
            heapq.heappush(latest, (-use, -depth, block))  # of one prompt the tail first
        while len(cached) > rows:
            use, _, block = heapq.heappop(latest)
            if cached.get(block) == -use:
                del cached[block]
    return hits / max(1, never)
