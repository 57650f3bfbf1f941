"""Who a model process is: which replica of which model, and where the cluster's actors are.

Covers: the hook on ``xinference.core.model`` that hands this to our engine classes, and the
question how many replicas of a model share a machine. Runs in model processes, on Xinference's
event loop.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

#: ``SupervisorActor.default_uid()``, without importing the supervisor into every model process.
SUPERVISOR_UID = "supervisor"

#: How long the supervisor may take to tell a model's replicas.
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
        """Interface on which this replica's own actors listen: its worker's."""
        if not self.worker_address:
            return "127.0.0.1"
        return self.worker_address.rpartition("://")[2].rpartition(":")[0]


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
