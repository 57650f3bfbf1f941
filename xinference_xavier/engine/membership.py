"""How this replica takes part in sharing: its scope, its name, and what the bridge needs.

Runs once on the scheduler thread, when the ranks have reported.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Mapping

from xinference_xavier.actors import hosts
from xinference_xavier.actors.lender import Lender
from xinference_xavier.actors.registry import ShareEntry
from xinference_xavier.actors.sharing import ShareSetup
from xinference_xavier.actors.token import share_token
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.messages import RankCapacity
from xinference_xavier.engine.namespace import Namespace
from xinference_xavier.engine.settings import EngineSettings, cluster_secret
from xinference_xavier.policy.directory import Publisher

logger = logging.getLogger(__name__)


def scope_of(namespace: Namespace, settings: EngineSettings) -> str:
    """Replicas of equal scope share: the namespace, and the launch unless the option allows all."""
    everybody = settings.options.xavier_share == "cluster"
    who = "cluster" if everybody else f"model {settings.model_uid}"
    return hashlib.sha256(f"{namespace.digest} {who}".encode()).hexdigest()


def join(
    settings: EngineSettings,
    find_namespace: Callable[[], Namespace],
    ranks: Mapping[tuple[int, int], RankCapacity],
    manager: XavierManager,
) -> tuple[ShareEntry, ShareSetup | None]:
    """What the tracker is told, and what sharing needs; None if this replica shares nothing.

    Never raises: an engine serves without peers.
    """
    try:
        return _join(settings, find_namespace(), ranks, manager)
    except Exception as error:
        logger.warning("xavier: this replica shares with nobody", exc_info=True)
        problem = f"Joining the others failed ({type(error).__name__}: {error})"
        entry = ShareEntry(
            member=uuid.uuid4().hex,
            scope=None,
            problem=problem,
            namespace={},
            machine=hosts.machine_id(),
        )
        return entry, None


def _join(
    settings: EngineSettings,
    namespace: Namespace,
    ranks: Mapping[tuple[int, int], RankCapacity],
    manager: XavierManager,
) -> tuple[ShareEntry, ShareSetup | None]:
    ordered = [ranks[place] for place in sorted(ranks)]
    problem = settings.unshared or next(
        (rank.share_problem for rank in ordered if rank.share_problem), None
    )
    secret = cluster_secret()
    entry = ShareEntry(
        member=uuid.uuid4().hex,
        scope=None if problem or secret is None else scope_of(namespace, settings),
        problem=problem,
        namespace=namespace.fields,
        machine=hosts.machine_id(),
    )
    if problem is not None:
        logger.warning("xavier: this replica shares with nobody: %s", problem)
    if entry["scope"] is None or secret is None:
        return entry, None
    publisher = Publisher(entry["member"])
    manager.publish_to(publisher.note, publisher.clear)
    setup = ShareSetup(
        entry=entry,
        token=share_token(secret, entry["scope"]),
        tiers=[rank.tier for rank in ordered if rank.tier is not None],
        memories=[rank.memory for rank in ordered],
        ttl_seconds=settings.options.xavier_lease_ttl,
        lender=Lender(manager.lock, lambda: manager.leases),
        publisher=publisher,
        readable=manager.keys,
        tell=manager.fetching.ended,
        checks=settings.options.xavier_self_check > 0,
    )
    return entry, setup
