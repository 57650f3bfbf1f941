"""Identity of a model process. The actor here has the host's signature; end-to-end tests use it."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.actors.tracker import TRACKER_UID, TrackerActor
from xinference_xavier.host import identity
from xinference_xavier.host.identity import Identity, local_replicas, sharing_problem

pytest.importorskip("xinference")


class OurModel:
    def set_identity(self, found: Identity) -> None:
        self.found = found


class HostModel:
    pass


def hooked_actor() -> Any:
    class ModelActor:
        def __init__(
            self,
            supervisor_address: str,
            worker_address: str,
            model: Any,
            replica_model_uid: str,
            request_limits: int | None = None,
        ) -> None:
            self.made = (supervisor_address, worker_address, model, replica_model_uid)

    module = types.ModuleType("xinference.core.model")
    module.ModelActor = ModelActor  # type: ignore[attr-defined]
    identity.on_model(module)
    identity.on_model(module)
    return ModelActor


def test_our_model_learns_who_it_is() -> None:
    model = OurModel()
    actor = hooked_actor()("s:1", "w:2", model, replica_model_uid="llama-2-rep3")
    assert actor.made == ("s:1", "w:2", model, "llama-2-rep3")
    assert model.found == Identity("llama-2", 3, "s:1", "w:2")


def test_models_of_the_host_are_left_alone() -> None:
    model = HostModel()
    actor = hooked_actor()("s:1", "w:2", model, "m-rep0")
    assert actor.made[2] is model
    assert vars(model) == {}


def test_hooked_signature_matches_the_host() -> None:
    import inspect

    from xinference.core.model import ModelActor

    names = set(inspect.signature(ModelActor.__init__).parameters)
    assert {"supervisor_address", "worker_address", "model", "replica_model_uid"} <= names


def test_supervisor_uid_is_the_hosts() -> None:
    from xinference.core.supervisor import SupervisorActor

    assert SupervisorActor.default_uid() == identity.SUPERVISOR_UID


#: Supervisor, worker, where a replica listens without a key, and where with one.
PLACES = [
    (None, None, "127.0.0.1", "127.0.0.1"),
    (None, "10.0.0.2:9", "10.0.0.2", "10.0.0.2"),
    ("127.0.0.1:8", "127.0.0.1:9", "127.0.0.1", "127.0.0.1"),
    ("127.0.0.1:8", "127.0.0.3:9", "127.0.0.3", "127.0.0.3"),
    ("10.0.0.1:8", "127.0.0.1:9", "127.0.0.1", "127.0.0.1"),
    # All on one machine, which other machines reach: `xinference-local --host 10.0.0.1`.
    ("10.0.0.1:8", "10.0.0.1:9", "127.0.0.1", "10.0.0.1"),
    ("gpu-3.lan:8", "gpu-3.lan:9", "127.0.0.1", "gpu-3.lan"),
    ("10.0.0.1:8", "10.0.0.2:9", "10.0.0.2", "10.0.0.2"),
    ("ucx://10.0.0.1:8", "ucx://10.0.0.2:9", "10.0.0.2", "10.0.0.2"),
    # `xinference-local --host 0.0.0.0`: nobody can be told such an address.
    ("0.0.0.0:8", "0.0.0.0:9", "127.0.0.1", "127.0.0.1"),
    (":::8", ":::9", "127.0.0.1", "127.0.0.1"),
    ("127.0.0.1:8", "0.0.0.0:9", "127.0.0.1", "127.0.0.1"),
    # A supervisor that is reached under this address is on this machine.
    ("0.0.0.0:8", "10.0.0.2:9", "127.0.0.1", "10.0.0.2"),
]


@pytest.mark.parametrize(("supervisor", "worker", "unsigned", "signed"), PLACES)
def test_where_a_replica_listens(
    supervisor: str | None,
    worker: str | None,
    unsigned: str,
    signed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identity = Identity("m", 0, supervisor, worker)
    monkeypatch.delenv("XOSCAR_AUTH_KEY", raising=False)
    assert identity.listen_host == unsigned
    monkeypatch.setenv("XOSCAR_AUTH_KEY", "")  # as xoscar sees it, this is no key
    assert identity.listen_host == unsigned
    monkeypatch.setenv("XOSCAR_AUTH_KEY", "k")
    assert identity.listen_host == signed


def test_a_worker_on_all_interfaces_takes_the_one_to_its_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xinference_xavier.actors.hosts.interface_towards", {"s": "10.0.0.7"}.get)
    assert Identity("m", 0, "s:8", "0.0.0.0:9").listen_host == "10.0.0.7"


SECRET = b"s" * 32


@pytest.mark.parametrize(
    ("share", "worker", "secret", "key", "words"),
    [
        ("model", "127.0.0.1:9", SECRET, "", None),
        ("cluster", "10.0.0.1:9", SECRET, "", None),
        ("model", "10.0.0.2:9", SECRET, "k", None),
        ("model", "10.0.0.2:9", SECRET, "", "listens on 10.0.0.2.* set XOSCAR_AUTH_KEY"),
        ("off", "127.0.0.1:9", SECRET, "k", "xavier_share=off"),
        ("model", "127.0.0.1:9", None, "k", "No tracker at 10.0.0.1:8 .* install"),
    ],
)
def test_why_a_replica_does_not_share(
    share: str,
    worker: str,
    secret: bytes | None,
    key: str,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XOSCAR_AUTH_KEY", key)
    problem = sharing_problem(share, Identity("m", 0, "10.0.0.1:8", worker), secret)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert re.search(words, problem)
        assert "s" * 32 not in problem


@pytest.fixture
async def supervisor() -> AsyncIterator[Any]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0)
    yield pool
    await pool.stop()


async def test_a_cluster_has_one_secret(supervisor: Any) -> None:
    address = supervisor.external_address
    tracker = await xo.create_actor(TrackerActor, uid=TRACKER_UID, address=address)
    secrets = [await identity.cluster_secret(Identity("m", n, address)) for n in range(2)]
    assert secrets[0] == secrets[1] == await tracker.secret()
    assert secrets[0] is not None
    assert len(secrets[0]) == 32


async def test_a_supervisor_without_tracker_has_none(supervisor: Any) -> None:
    assert await identity.cluster_secret(Identity("m", 0, supervisor.external_address)) is None
    assert await identity.cluster_secret(Identity("m", 0, None)) is None


class SilentTracker(xo.StatelessActor):
    async def secret(self, offered: bytes | None = None) -> bytes:
        await asyncio.sleep(3600)
        return b""


@pytest.mark.parametrize("gone", ["silent", "unreachable"])
async def test_a_tracker_that_does_not_answer_is_not_waited_for(
    supervisor: Any, gone: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identity, "ASK_SECONDS", 0.2)
    address = supervisor.external_address
    if gone == "silent":
        await xo.create_actor(SilentTracker, uid=TRACKER_UID, address=address)
    else:
        await supervisor.stop()
    found = await asyncio.wait_for(identity.cluster_secret(Identity("m", 0, address)), 30)
    assert found is None
    assert "m shares its snapshots with nobody" in caplog.text


def instance(replica: int, *workers: str) -> list[dict[str, Any]]:
    statuses = [
        {"replica_model_uid": f"m-rep{n}", "worker_address": w} for n, w in enumerate(workers)
    ]
    return [{"replica": replica, "replica_statuses": statuses}]


@pytest.mark.parametrize(
    ("instances", "count"),
    [
        ([], 1),
        (instance(1), 1),
        (instance(3), 3),
        (instance(3, "here", "here", "here"), 3),
        (instance(3, "there", "here", "there"), 1),
        (instance(4, "there"), 3),
        (instance(2, "", "here"), 2),
        (instance(1, "there", "there"), 1),
    ],
)
def test_replicas_not_placed_elsewhere_count_as_local(
    instances: list[dict[str, Any]], count: int
) -> None:
    assert local_replicas(instances, Identity("m", 0, "s:1", "here")) == count


async def test_unreachable_supervisor_counts_one(caplog: pytest.LogCaptureFixture) -> None:
    assert await identity.count_local_replicas(Identity("m", 0, "127.0.0.1:9", "here")) == 1
    assert "Counting the replicas of m failed" in caplog.text
    assert await identity.count_local_replicas(Identity("m", 0)) == 1
