"""What the policy counted since the engine started. Blocks unless the name says otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from xinference_xavier.types import SkipReason


@dataclass(slots=True)
class Counters:
    """Plain monotonic counters; read by other threads, written by the scheduler thread only."""

    stored_gpu: int = 0
    stored_cpu: int = 0
    #: Blocks that arrived from a peer.
    fetched: int = 0
    demotions: int = 0
    promotions: int = 0
    #: Moved within a tier that shrinks.
    relocations: int = 0
    #: Copies made for a move whose source was pinned or cleared meanwhile.
    moves_dropped: int = 0
    #: Snapshots dropped from a tier to make room.
    evictions_gpu: int = 0
    evictions_cpu: int = 0
    #: Copy jobs (stores, loads or moves), not blocks, that failed on at least one rank.
    failed_copies: int = 0
    skips: dict[str, int] = field(default_factory=lambda: {r.value: 0 for r in SkipReason})

    def skip(self, reason: SkipReason, blocks: int = 1) -> None:
        self.skips[reason.value] += blocks

    def as_dict(self) -> dict[str, int]:
        """All counters but the skips, by name."""
        values = asdict(self)
        del values["skips"]
        return values
