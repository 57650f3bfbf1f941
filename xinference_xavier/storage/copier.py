"""The copier: the one place where bytes move between KV blocks and rows.

This module states the contract and picks the implementation for the device; ``cpu_copier`` and
``cuda_copier`` fulfil it. A copier belongs to one vLLM worker and is driven by its main thread.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.jobs import CopyJob, CopyKind, CopyResult
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.row_check import RowCheck
from xinference_xavier.storage.self_check import SelfCheck
from xinference_xavier.storage.slab import Slab

__all__ = ["Copier", "CopyJob", "CopyKind", "CopyResult", "create_copier"]


class Copier(Protocol):
    """Runs copy jobs as if in the order they were submitted; what does not meet may overtake.

    A failed job leaves the content of what it writes unspecified and is reported; the jobs after
    it still run. No method but ``wait`` ever blocks, and none raises.
    """

    #: Whether ``submit`` may be called on any thread.
    any_thread: bool
    #: Whether a move takes time from a step that computes beside it.
    moves_slow_steps: bool
    #: Checksums of rows that come from a peer.
    row_check: RowCheck

    @property
    def mismatches(self) -> int:
        """Loads and fetched rows that the self-check found to differ from what was stored."""

    def submit(self, job: CopyJob) -> None:
        """Queue a job. STOREs and LOADs come after what the current stream has been given."""

    def poll(self) -> list[CopyResult]:
        """The jobs that ended since the last call."""

    def wait(self, job_ids: Collection[int]) -> None:
        """Make sure that KV blocks of these jobs may be overwritten or read after this call.

        On the CPU this blocks until the jobs have ended; on CUDA the current stream waits for
        their KV block accesses, and the host never does. Unknown and ended jobs are ignored.
        """

    def close(self) -> None:
        """Finish what was submitted and stop. Idempotent; a job submitted later fails."""


def create_copier(
    layout: RowLayout,
    device_slab: Slab | None,
    host_slab: Slab | None,
    *,
    self_check: float = 0.0,
    seed: int = 0,
    faults: Faults | None = None,
) -> Copier:
    """The copier for the device that holds the KV caches; a slab is None where a tier is off.

    Raises:
        ValueError: the slabs do not fit the layout, or ``self_check`` is outside 0..1.
    """
    for name, slab in (("device", device_slab), ("host", host_slab)):
        if slab is not None and slab.row_bytes != layout.row_bytes:
            raise ValueError(
                f"the {name} slab has rows of {slab.row_bytes} bytes, the layout needs "
                f"{layout.row_bytes}"
            )
    check = SelfCheck(layout, self_check, seed) if self_check else None
    if layout.device.type == "cpu":
        from xinference_xavier.storage.cpu_copier import CpuCopier

        return CpuCopier(layout, device_slab, host_slab, check=check, faults=faults)
    from xinference_xavier.storage.cuda_copier import CudaCopier

    return CudaCopier(layout, device_slab, host_slab, check=check, faults=faults)
