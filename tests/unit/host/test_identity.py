"""Identity of a model process. The actor here has the host's signature; end-to-end tests use it."""

from __future__ import annotations

import types
from typing import Any

import pytest

from xinference_xavier.host import identity
from xinference_xavier.host.identity import Identity, local_replicas

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


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:9", "127.0.0.1"),
        ("gpu-3.lan:9", "gpu-3.lan"),
        ("ucx://10.0.0.2:9", "10.0.0.2"),
        (None, "127.0.0.1"),
    ],
)
def test_listen_host_is_the_workers(address: str | None, host: str) -> None:
    assert Identity("m", 0, None, address).listen_host == host


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
