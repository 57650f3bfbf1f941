"""What a copier moves per second on this machine's device, against what the machine can move.

``python -m benchmarks.gpu_store [--shape 8b] [--rows 256] [--rounds 15] [--device cuda]``. Needs
torch, Triton and numpy; no vLLM. For each kind of copy (store, load, demote, promote, store to and
load from the host tier) jobs of many rows run through the real copier, in turns (A B B A) with one
large copy over the same way: page-locked memory and the device, or the device and itself. The same
demotion is done once more page by page, each with a copy that waits, as a store without packed rows
does. Bytes are compared after every kind.

On CUDA it also counts, with the profiler, calls that wait for the device, and allocations, while
jobs are submitted and polled, and times steps of a memory-bound model stand-in on the compute
stream with and without demotion flat out. Prints a table and, last, one JSON object. Times of jobs
are device time between events (CPU: of the copy thread).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.copier_rig import SHAPES, Bench

#: Marks the end of what the profiler is asked about.
FLOODED = "xavier: flooded"
#: Names of CUDA calls that make the host wait.
WAITING_CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaHostAlloc",
    "cudaFree",
)


#: Kinds of copy, and the way over which the large copy beside them goes.
KINDS = {
    "store": "device",
    "load": "device",
    "demote": "to_host",
    "promote": "to_device",
    "store_to_host": "to_host",
    "load_from_host": "to_device",
}


def timed(device: str, work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes on the device."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


class Peaks:
    """One copy of as many bytes as a job, over each way."""

    def __init__(self, nbytes: int, device: str) -> None:
        pinned = device != "cpu"
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        here, there = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._pairs = {"device": (there, here), "to_host": (host, here), "to_device": (here, host)}
        self._device, self._nbytes = device, nbytes

    def run(self, way: str) -> float:
        """Bytes per second."""
        target, source = self._pairs[way]
        seconds = timed(self._device, lambda: target.copy_(source, non_blocking=True))
        return self._nbytes / seconds


def compare(bench: Bench, peaks: Peaks, kind: str, order: np.ndarray, rounds: int) -> dict:
    """Rates of a kind and of the large copy in turns, and the quartiles of their ratio."""
    way, ours, large = KINDS[kind], [], []
    bench.run(kind, order)
    peaks.run(way)
    for _ in range(rounds):  # A B B A
        a = bench.run(kind, order)
        b = [peaks.run(way), peaks.run(way)]
        ours.append(statistics.mean([a, bench.run(kind, order)]))
        large.append(statistics.mean(b))
    ratios = sorted(mine / whole for mine, whole in zip(ours, large, strict=True))
    quarter = len(ratios) // 4
    return {
        "gb_per_s": statistics.median(ours) / 1e9,
        "large_copy_gb_per_s": statistics.median(large) / 1e9,
        "peak_gb_per_s": max(large) / 1e9,
        "share": statistics.median(ratios),
        "share_quartiles": [ratios[quarter], ratios[-1 - quarter]],
    }


def verify(bench: Bench, kind: str, order: np.ndarray) -> None:
    """A round trip by way of ``kind`` leaves the KV blocks as they were."""
    before = [tensor.clone() for tensor in bench.layout.tensors]
    way = {
        "store": ("store", "load"),
        "load": ("store", "load"),
        "demote": ("store", "demote", "load_from_host"),
        "promote": ("store_to_host", "promote", "load"),
        "store_to_host": ("store_to_host", "load_from_host"),
        "load_from_host": ("store_to_host", "load_from_host"),
    }[kind]
    for index, step in enumerate(way):
        if index == len(way) - 1:
            for tensor in bench.layout.tensors:
                tensor.zero_()
        bench.run(step, order)
    for tensor, known in zip(bench.layout.tensors, before, strict=True):
        if not torch.equal(tensor, known):
            raise RuntimeError(f"{kind}: bytes differ")


def page_by_page(bench: Bench, rows: int) -> float:
    """Bytes per second of demoting KV blocks tensor by tensor, each copy waited for."""
    host = bench.host_slab.view(0, bench.rows).view(torch.int8)

    def work() -> None:
        for row in range(rows):
            for page in bench.layout.groups[0]:
                target = host[row, page.offset : page.offset + page.nbytes]
                target.copy_(bench.layout.tensors[page.tensor][row, : page.nbytes])

    work()
    return rows * bench.layout.row_bytes / timed(bench.layout.device.type, work)


def orders(rows: int) -> dict[str, np.ndarray]:
    """Rows in one run, and in runs of one."""
    scattered = np.random.default_rng(0).permutation(rows)
    return {"one_run": np.arange(rows, dtype=np.int64), "scattered": scattered.astype(np.int64)}


def waits_and_allocations(bench: Bench, order: np.ndarray, jobs: int) -> dict[str, int]:
    """Calls that wait for the device, and allocations on it, while jobs are given and polled."""
    from torch.profiler import ProfilerActivity, profile

    def flood() -> None:
        for number in range(jobs):
            kind = ("store", "demote", "store_to_host")[number % 3]
            bench.copier.submit(bench.job(number, kind, order))
            bench.copier.poll()

    flood()  # grows the ring of index buffers to its depth
    torch.cuda.synchronize()
    bench.copier.poll()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        flood()
        grown = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
        with torch.profiler.record_function(FLOODED):
            pass
    # What comes later is the profiler's own wait.
    over = next(event.time_range.start for event in trace.events() if event.name == FLOODED)
    calls = [event.name for event in trace.events() if event.time_range.start < over]
    torch.cuda.synchronize()
    bench.copier.poll()
    return {
        "jobs": jobs,
        "waiting_calls": sum(name in WAITING_CALLS for name in calls),
        "allocations": grown,
    }


class Steps:
    """Decode steps of a stand-in: each reads ``nbytes`` of weights once, bound by memory."""

    def __init__(self, nbytes: int, layers: int = 32) -> None:
        width = 4096
        height = nbytes // layers // width // 2
        self._weights = [
            torch.randn(height, width, dtype=torch.bfloat16, device="cuda") for _ in range(layers)
        ]
        self._x = torch.randn(width, 8, dtype=torch.bfloat16, device="cuda")

    def __call__(self) -> None:
        for weight in self._weights:
            weight @ self._x


def step_times(bench: Bench, order: np.ndarray, steps: int) -> dict[str, float]:
    """Step times (ms) alone and beside demotion flat out, in turns; p50, p99 and their ratios."""
    step, times = Steps(4 << 30), {False: [], True: []}  # type: dict[bool, list[float]]
    for busy in (False, True, True, False) * 4:
        for _ in range(steps // 8):
            if busy:
                while len(bench.copier._flights) < 4:  # type: ignore[attr-defined]
                    bench.copier.submit(bench.job(1, "demote", order))
            times[busy].append(timed("cuda", step))
            bench.copier.poll()
        torch.cuda.synchronize()
        bench.copier.poll()
    alone, beside = (np.percentile(times[busy], [50, 99]) * 1e3 for busy in (False, True))
    return {
        "alone_p50_ms": alone[0],
        "alone_p99_ms": alone[1],
        "beside_p50_ms": beside[0],
        "beside_p99_ms": beside[1],
        "p99_ratio": beside[1] / alone[1],
    }


def measure(shape: str, rows: int, rounds: int, device: str) -> Iterator[tuple[str, dict]]:
    """Name and figures of one measurement after the other."""
    bench = Bench.make(SHAPES[shape], rows, device)
    peaks = Peaks(bench.nbytes, device)
    try:
        for kind in KINDS:
            for name, order in orders(rows).items():
                verify(bench, kind, order)
                yield f"{kind}_{name}", compare(bench, peaks, kind, order, rounds)
        few = min(rows, 32)
        yield "page_by_page", {"gb_per_s": page_by_page(bench, few) / 1e9}
        if device != "cpu":
            for name, order in orders(rows).items():
                yield f"store_path_{name}", waits_and_allocations(bench, order, 12)
            yield "steps", step_times(bench, orders(rows)["one_run"], 400)
    finally:
        bench.close()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=256, help="rows a job, and of each tier")
    parser.add_argument("--rounds", type=int, default=15, help="A B B A each")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the benchmark itself")
    options = parser.parse_args(arguments)
    if options.rows < 1 or options.rounds < 1:
        parser.error("--rows and --rounds must be at least 1")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: no CUDA device here; --device cpu tries it out")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    tensors, page_bytes = SHAPES[options.shape]
    machine = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    head = {"shape": options.shape, "row_bytes": tensors * page_bytes, "machine": machine}
    print(f"{machine}, torch {torch.__version__}: {options.rows} rows of {head['row_bytes']} bytes")
    figures: dict[str, Any] = {**head, "rows": options.rows, "rounds": options.rounds}
    for name, found in measure(options.shape, options.rows, options.rounds, options.device):
        figures[name] = found
        words = [
            f"{key} {value:.3g}" for key, value in found.items() if not isinstance(value, list)
        ]
        print(f"{name:26}", "  ".join(words), flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
