"""What the self-check costs: copies with and without checksums, and comparing rows of a peer.

``python -m benchmarks.self_check``: one rank, 134 blocks of 589,824 bytes in 24 pages, as a prompt
of 4,300 tokens of the demonstration's model has. Medians of single-threaded copies in RAM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from xinference_xavier.storage.copier import Copier, CopyJob, CopyKind, create_copier
from xinference_xavier.storage.jobs import NO_INDEXES
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.slab import Slab

BLOCKS, PAGES, PAGE_BYTES = 134, 24, 24_576
SHARES = (0.0, 0.001, 0.01, 0.1, 1.0)
ROUNDS = 15


def job(number: int, kind: CopyKind) -> CopyJob:
    places, sizes = np.arange(BLOCKS, dtype=np.int64), (BLOCKS,)
    if kind is CopyKind.STORE:
        return CopyJob(number, kind, places, sizes, NO_INDEXES, places)
    return CopyJob(number, kind, places, sizes, places, NO_INDEXES)


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def run(copier: Copier, kind: CopyKind) -> None:
    copier.submit(job(1, kind))
    copier.wait({1})
    (result,) = copier.poll()
    assert result.ok, result.error


def main() -> None:
    tensors = [torch.zeros(BLOCKS, PAGE_BYTES, dtype=torch.int8) for _ in range(PAGES)]
    layout = RowLayout.from_refs(tensors, [[(n, PAGE_BYTES) for n in range(PAGES)]])
    for tensor in tensors:
        tensor.random_(-128, 128)
    print(f"{BLOCKS} blocks of {layout.row_bytes:,} bytes, milliseconds (median of {ROUNDS})")
    print(f"{'share':>6} {'store':>8} {'load':>8} {'compare fetched':>16}")
    places = np.arange(BLOCKS, dtype=np.int64)
    for share in SHARES:
        slab = Slab(BLOCKS, layout.row_bytes, "cpu")
        copier = create_copier(layout, slab, None, self_check=share)
        run(copier, CopyKind.STORE)
        store = milliseconds(lambda c=copier: run(c, CopyKind.STORE))
        load = milliseconds(lambda c=copier: run(c, CopyKind.LOAD))
        rows, compare = copier.row_check, 0.0
        told = rows.tell(places)
        if told is not None:
            compare = milliseconds(lambda r=rows, t=told: r.wrong(places, t))
        assert copier.mismatches == 0
        print(f"{share:>6} {store:>8.1f} {load:>8.1f} {compare:>16.1f}")
        copier.close()
        slab.close()


if __name__ == "__main__":
    main()
