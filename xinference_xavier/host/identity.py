"""Who a model process is: which replica of which model, and where the cluster's actors are.

Covers: the hook on ``xinference.core.model`` that hands this to our engine classes, where a replica
listens and whether it may share, and what the supervisor is asked: how many replicas of a model
share a machine, and the cluster's secret. Runs in model processes, on Xinference's event loop.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from xinference_xavier.actors import hosts

logger = logging.getLogger(__name__)

#: ``SupervisorActor.default_uid()``, without importing the supervisor into every model process.
SUPERVISOR_UID = "supervisor"

#: With it xoscar signs every message and refuses those of strangers before it unpickles them.
AUTH_VARIABLE = "XOSCAR_AUTH_KEY"

#: How long the supervisor or the tracker may take for one answer.
ASK_SECONDS = 3.0


@dataclass(frozen=True)
class Identity:
    """One replica. Addresses are xoscar's ``host:port``; None where unknown."""

    model_uid: str
    replica: int
    supervisor_address: str | None = None
    worker_address: str | None = None

    @property
    def listen_host(self) -> str:
        """Interface on which this replica's own actors listen.

        Its worker's, so that every machine of the cluster reaches it, if messages are signed; else
        loopback wherever worker and supervisor are on one machine.
        """
        supervisor = hosts.host_of(self.supervisor_address)
        worker = hosts.host_of(self.worker_address) or hosts.LOOPBACK
        if hosts.is_unspecified(worker):  # no address to be reached on
            worker = hosts.interface_towards(supervisor)
        if hosts.is_loopback(worker) or os.environ.get(AUTH_VARIABLE):
            return worker
        local = worker == supervisor or (supervisor and hosts.is_unspecified(supervisor))
        return hosts.LOOPBACK if local else worker


def sharing_problem(share: str, identity: Identity, secret: bytes | None) -> str | None:
    """The sentence why this replica shares snapshots with nobody, or None if it may.

    Args:
        share: the launch option ``xavier_share``.
        secret: the cluster's; None when no tracker gave one.
    """
    if share == "off":
        return "xavier_share=off: this replica keeps its snapshots to itself"
    if secret is None:
        where = f"at {identity.supervisor_address}" if identity.supervisor_address else "known"
        return (
            f"No tracker {where} answered when this replica was launched: install "
            "xinference-xavier where Xinference's supervisor runs, start that again, then launch "
            "this model again"
        )
    host = identity.listen_host
    if not hosts.is_loopback(host) and not os.environ.get(AUTH_VARIABLE):
        return (
            f"This replica listens on {host}, which other machines reach, and messages are not "
            f"signed: set {AUTH_VARIABLE} to the same text for the supervisor and every worker, "
            "and start them again"
        )
    return None


def on_model(module: ModuleType) -> None:
    """Wrap ``ModelActor.__init__`` to hand our models their identity."""
    actor: Any = module.ModelActor
    original = actor.__init__
    if getattr(original, "_hands_out_identity", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        _hand_out(signature.bind(self, *args, **kwargs).arguments)

    __init__._hands_out_identity = True  # type: ignore[attr-defined]
    actor.__init__ = __init__


def _hand_out(arguments: dict[str, Any]) -> None:
    """Give the model its identity. Models that are not ours are left alone."""
    model = arguments.get("model")
    if not hasattr(type(model), "set_identity"):
        return
    model_uid, replica = _split_uid(arguments["replica_model_uid"])
    identity = Identity(
        model_uid, replica, arguments.get("supervisor_address"), arguments.get("worker_address")
    )
    model.set_identity(identity)  # type: ignore[union-attr]


def _split_uid(replica_model_uid: str) -> tuple[str, int]:
    from xinference.core.utils import parse_replica_model_uid

    model_uid, replica = parse_replica_model_uid(replica_model_uid)
    return model_uid, max(replica, 0)


async def cluster_secret(identity: Identity) -> bytes | None:
    """The secret of this cluster, or None when no tracker answers in time."""
    import xoscar as xo

    from xinference_xavier.actors.tracker import find_tracker

    address = identity.supervisor_address
    if address is None:
        return None

    async def ask() -> bytes | None:
        tracker = await find_tracker(address)
        answer: bytes | None = None if tracker is None else await tracker.secret()
        return answer

    try:
        secret: bytes | None = await xo.wait_for(ask(), ASK_SECONDS)
        return secret
    except Exception as error:
        logger.warning(
            "Asking the tracker at %s for the cluster's secret failed (%s: %s): %s shares its "
            "snapshots with nobody",
            address,
            type(error).__name__,
            error,
            identity.model_uid,
        )
        return None


async def count_local_replicas(identity: Identity) -> int:
    """How many replicas of this model share this worker's memory, at least 1.

    Replicas that are not placed yet count as local: an automatic budget must not take what the
    next one will need. 1 when the supervisor does not answer.
    """
    import xoscar as xo

    if identity.supervisor_address is None:
        return 1

    async def ask() -> list[dict[str, Any]]:
        supervisor = await xo.actor_ref(address=identity.supervisor_address, uid=SUPERVISOR_UID)
        found: list[dict[str, Any]] = await supervisor.get_instance_info(None, identity.model_uid)
        return found

    try:
        return local_replicas(await xo.wait_for(ask(), ASK_SECONDS), identity)
    except Exception as error:
        logger.warning(
            "Counting the replicas of %s failed (%s: %s): an automatic CPU budget assumes one "
            "replica on this machine",
            identity.model_uid,
            type(error).__name__,
            error,
        )
        return 1


def local_replicas(instances: list[dict[str, Any]], identity: Identity) -> int:
    """The same from Xinference's instance records."""
    if not instances:
        return 1
    instance = instances[0]
    elsewhere = {
        status["replica_model_uid"]
        for status in instance.get("replica_statuses", [])
        if status["worker_address"] not in ("", identity.worker_address)
    }
    return max(1, int(instance.get("replica") or 1) - len(elsewhere))
