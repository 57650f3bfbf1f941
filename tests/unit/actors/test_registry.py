"""The registry's rules, with a clock of the test's own."""

from __future__ import annotations

from xinference_xavier.actors.registry import ReplicaEntry, ReplicaRegistry


def entry(uid: str = "m", replica: int = 0, **changes: object) -> ReplicaEntry:
    fields = {
        "model_uid": uid,
        "replica": replica,
        "state": "running",
        "address": "127.0.0.1:1",
        "pid": 10,
        "started": 100.0,
        "options": {},
        "stats": {"row_bytes": 1},
    }
    return ReplicaEntry(**{**fields, **changes})  # type: ignore[typeddict-item]


def test_entries_come_sorted_with_their_age() -> None:
    registry = ReplicaRegistry()
    registry.heartbeat(entry("b"), 1.0)
    registry.heartbeat(entry("a", 1), 2.0)
    registry.heartbeat(entry("a", 0), 3.0)
    found = registry.replicas(5.0)
    assert [(e["model_uid"], e["replica"]) for e in found] == [("a", 0), ("a", 1), ("b", 0)]
    assert [e["heartbeat_age_seconds"] for e in found] == [2.0, 3.0, 4.0]
    assert [e["model_uid"] for e in registry.replicas(5.0, "b")] == ["b"]


def test_entry_expires_without_heartbeats_and_returns_with_one() -> None:
    registry = ReplicaRegistry(expire_seconds=30)
    registry.heartbeat(entry(), 0.0)
    assert len(registry.replicas(29.9)) == 1
    assert registry.replicas(30.0) == []
    assert registry.heartbeat(entry(), 31.0)
    assert len(registry.replicas(60.9)) == 1


def test_successor_takes_the_place_and_predecessor_cannot_take_it_back() -> None:
    registry = ReplicaRegistry()
    registry.heartbeat(entry(pid=10, started=100.0), 0.0)
    assert registry.heartbeat(entry(pid=11, started=105.0), 1.0)
    assert not registry.heartbeat(entry(pid=10, started=100.0), 2.0)
    assert not registry.forget("m", 0, started=100.0)
    assert [e["pid"] for e in registry.replicas(2.0)] == [11]
    assert registry.forget("m", 0, started=105.0)
    assert registry.replicas(2.0) == []


def test_predecessor_is_accepted_once_the_successor_expired() -> None:
    """Hosts disagree on time: a start in the future blocks a place for a while only."""
    registry = ReplicaRegistry(expire_seconds=30)
    registry.heartbeat(entry(started=900.0), 0.0)
    assert not registry.heartbeat(entry(started=100.0), 29.0)
    assert registry.heartbeat(entry(started=100.0), 31.0)


def test_last_statistics_outlive_a_heartbeat_without_any() -> None:
    registry = ReplicaRegistry()
    registry.heartbeat(entry(stats={"row_bytes": 7}), 0.0)
    registry.heartbeat(entry(stats=None), 1.0)
    assert registry.replicas(1.0)[0]["stats"] == {"row_bytes": 7}
    registry.heartbeat(entry(stats=None, pid=11, started=101.0), 2.0)
    assert registry.replicas(2.0)[0]["stats"] is None


def test_forgetting_the_unknown_changes_nothing() -> None:
    assert not ReplicaRegistry().forget("m", 0, 1.0)
