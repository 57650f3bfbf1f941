"""Copies on CUDA: asynchronous, ordered by events, polled; the host never waits.

Three side streams: ``store`` runs gather kernels, ``load`` runs host-to-device copies and scatter
kernels, ``move`` runs copies between the tiers and drains staged stores. Gathers and scatters come
after what the compute stream had been given when the job was submitted. A job also waits, on the
device, for earlier jobs that used its rows or blocks, so the channel is ordered wherever order can
be seen, while a gather never queues behind a copy over the bus that has nothing to do with it.
Everything runs on the worker's main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

import numpy as np
import torch

from xinference_xavier.storage.cuda_buffers import STAGING_PIECES, IndexRing, Staging
from xinference_xavier.storage.cuda_runtime import CudaRuntime, Event, Runtime, Stream
from xinference_xavier.storage.faults import Faults
from xinference_xavier.storage.jobs import CopyJob, CopyKind, CopyResult, Indexes
from xinference_xavier.storage.layout import RowLayout
from xinference_xavier.storage.ordering import Flight, LastUse
from xinference_xavier.storage.row_check import RowCheck
from xinference_xavier.storage.rowmap import RowMap, row_addresses, runs
from xinference_xavier.storage.self_check import SelfCheck
from xinference_xavier.storage.slab import Slab
from xinference_xavier.types import NOWHERE

logger = logging.getLogger(__name__)


class CudaCopier:
    """Runs jobs on side streams of the KV caches' device."""

    any_thread = False
    moves_slow_steps = False

    def __init__(
        self,
        layout: RowLayout,
        device_slab: Slab | None,
        host_slab: Slab | None,
        *,
        check: SelfCheck | None = None,
        faults: Faults | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._layout = layout
        self._rows = RowMap(device_slab, host_slab)
        self._check = check
        #: For rows that come from a peer.
        self.row_check = RowCheck(self._rows, check)
        self._faults = faults
        self._runtime = rt = runtime or CudaRuntime(layout)
        self._store, self._load, self._move = rt.stream(), rt.stream(), rt.stream()
        self._ring = IndexRing(rt, layout.device)
        self._staging: tuple[Staging, ...] = ()
        if host_slab is not None:
            self._staging = (
                Staging(rt, layout.row_bytes, layout.device, pieces=STAGING_PIECES),
                Staging(rt, layout.row_bytes, layout.device, pieces=1),
            )
        self._flights: dict[int, Flight] = {}
        self._sequence = 0
        self._last_use = LastUse([len(m) for m in self._rows.memories], layout.num_blocks)
        self._closed = False

    @property
    def mismatches(self) -> int:
        """Loads and fetched rows that the self-check found to differ from what was stored."""
        return self._check.mismatches if self._check is not None else 0

    @property
    def staging_bytes(self) -> int:
        """Device memory for rows on their way to and from the host tier."""
        return sum(staging.nbytes for staging in self._staging)

    def submit(self, job: CopyJob) -> None:
        """Launch a job's copies behind what the current stream has been given."""
        self._sequence += 1
        flight = Flight(job, self._sequence)
        issue = {
            CopyKind.STORE: self._issue_store,
            CopyKind.LOAD: self._issue_load,
            CopyKind.MOVE: self._issue_move,
        }[job.kind]
        worth_retrying = False
        try:
            if self._closed:
                raise RuntimeError("the copier is closed")
            job.check(self._layout)
            if self._faults is not None:
                self._faults.strike(job.kind.value)
            worth_retrying = job.kind is CopyKind.LOAD
            issue(flight)
        except Exception as exc:
            self._recover(flight, exc, retry=worth_retrying)
        # Also when it failed: what was launched must end before its rows are used again.
        self._flights[flight.sequence] = flight

    def poll(self) -> list[CopyResult]:
        """The jobs whose events are done."""
        results = []
        for sequence, flight in list(self._flights.items()):
            try:
                if not all(self._runtime.done(event) for event in flight.ends):
                    continue
                result = self._finish(flight)
            except Exception as exc:  # an asynchronous CUDA error surfaces here
                logger.warning("copy job %d failed: %r", flight.job.job_id, exc)
                result = CopyResult.of_failure(flight.job, exc, 0.0)
            del self._flights[sequence]
            results.append(result)
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Make the current stream wait for these jobs' accesses to KV blocks."""
        wanted = set(job_ids)
        for flight in self._flights.values():
            if flight.job.job_id in wanted:
                for event in flight.touched:
                    self._runtime.wait(self._runtime.current(), event)

    def close(self) -> None:
        """Wait for what was submitted and give the buffers back."""
        if self._closed:
            return
        self._closed = True
        for flight in self._flights.values():
            for event in flight.ends:
                self._runtime.synchronize(event)
        for staging in self._staging:
            staging.close()
        self._rows = RowMap(None, None)
        self.row_check.close()

    def _finish(self, flight: Flight) -> CopyResult:
        job = flight.job
        if self._check is not None and flight.expected:
            wrong = self._check.verify(job, flight.expected, flight.failed)
            if wrong:
                flight.failed |= wrong
                flight.error = "self-check mismatch"
        failed = np.array(sorted(flight.failed), np.int64)
        seconds = 0.0
        if flight.start is not None and flight.ends:
            seconds = max(self._runtime.seconds(flight.start, end) for end in flight.ends)
        ok = not len(failed) if job.kind is CopyKind.LOAD else not flight.error
        copied = ok or job.kind is CopyKind.LOAD
        nbytes = job.payload_bytes(self._layout, failed) if copied else 0
        error = "" if ok else flight.error
        return CopyResult(job.job_id, job.kind, ok, nbytes, seconds, failed, error)

    def _issue_store(self, flight: Flight) -> None:
        job, rt = flight.job, self._runtime
        memory, rows = self._rows.resolve(job.targets)
        computed = rt.record(rt.current())
        device = np.flatnonzero(memory < self._rows.device_memories)
        host = np.flatnonzero(memory >= self._rows.device_memories)
        self._order_rows(flight, self._store, memory[device], rows[device])
        self._order_rows(flight, self._move, memory[host], rows[host])
        self._order_blocks(flight, self._store, job.blocks)
        rt.wait(self._store, computed)
        if self._check is not None:
            self._check.stored(job)
        flight.start = rt.record(self._store)
        if len(device):
            addresses = self._rows.addresses(memory[device], rows[device])
            self._copy_pages(self._store, job, device, addresses)
        if len(host):
            self._store_to_host(job, host, memory[host], rows[host])
        self._seal(flight, self._store, *([self._move] if len(host) else []))

    def _store_to_host(
        self, job: CopyJob, positions: Indexes, memory: Indexes, rows: Indexes
    ) -> None:
        """Gather into staging, piece by piece, and drain each piece on the move stream."""
        rt, staging = self._runtime, self._staging[0]
        for start in range(0, len(positions), staging.piece_rows):
            part = slice(start, start + staging.piece_rows)
            piece, staged = staging.take(self._store)
            count = len(positions[part])
            self._copy_pages(self._store, job, positions[part], row_addresses(staged, count))
            rt.wait(self._move, rt.record(self._store))
            for run in runs(np.arange(count), rows[part], memory[part], adjacent=True):
                target = self._rows.memories[memory[part][run.start]][run.right]
                self._copy(self._move, target, staged[run.left])
            staging.give_back(piece, self._move)

    def _issue_load(self, flight: Flight) -> None:
        job, rt = flight.job, self._runtime
        gone = job.sources == NOWHERE
        wanted = np.flatnonzero(~gone)
        if len(wanted) < len(job):
            flight.failed, flight.error = set(np.flatnonzero(gone).tolist()), "the source is gone"
        if self._check is not None:
            flight.expected = self._check.expected(job)
        memory, rows = self._rows.resolve(job.sources[wanted])
        computed = rt.record(rt.current())
        self._order_rows(flight, self._load, memory, rows)
        self._order_blocks(flight, self._load, job.blocks[wanted])
        flight.start = rt.record(self._load)
        host = memory >= self._rows.device_memories
        if host.any():  # first, since the way over the bus need not wait for the compute stream
            self._load_from_host(job, wanted[host], memory[host], rows[host], computed)
        rt.wait(self._load, computed)
        if not host.all():
            addresses = self._rows.addresses(memory[~host], rows[~host])
            self._copy_pages(self._load, job, wanted[~host], addresses)
        self._seal(flight, self._load)

    def _load_from_host(
        self, job: CopyJob, positions: Indexes, memory: Indexes, rows: Indexes, computed: Event
    ) -> None:
        """Bring rows into staging and scatter them; one stream, so staging frees itself."""
        staging = self._staging[1]
        for start in range(0, len(positions), staging.piece_rows):
            part = slice(start, start + staging.piece_rows)
            piece, staged = staging.take(self._load)
            count = len(positions[part])
            for run in runs(np.arange(count), rows[part], memory[part], adjacent=True):
                source = self._rows.memories[memory[part][run.start]][run.right]
                self._copy(self._load, staged[run.left], source)
            self._runtime.wait(self._load, computed)
            self._copy_pages(self._load, job, positions[part], row_addresses(staged, count))
            staging.give_back(piece, self._load)

    def _issue_move(self, flight: Flight) -> None:
        job, memories = flight.job, self._rows.memories
        source_memory, sources = self._rows.resolve(job.sources)
        target_memory, targets = self._rows.resolve(job.targets)
        self._order_rows(flight, self._move, source_memory, sources)
        self._order_rows(flight, self._move, target_memory, targets)
        flight.start = self._runtime.record(self._move)
        pairs = source_memory * len(memories) + target_memory
        for run in runs(sources, targets, pairs, adjacent=True):
            source = memories[source_memory[run.start]][run.left]
            target = memories[target_memory[run.start]][run.right]
            self._copy(self._move, target, source)
        if self._check is not None:
            self._check.moved(job)
        self._seal(flight, self._move)

    def _recover(self, flight: Flight, exc: Exception, *, retry: bool) -> None:
        """A job could not be launched: fail it, or load what can be loaded position by position."""
        job = flight.job
        logger.warning("%s job %d failed: %r", job.kind.value, job.job_id, exc)
        flight.error = f"{type(exc).__name__}: {exc}"
        if job.kind is CopyKind.LOAD:
            flight.failed = set(range(len(job)))
        elif self._check is not None:
            self._check.forget(job.targets)
        if self._closed:
            return
        try:
            if retry:
                self._load_singly(flight)
            self._seal(flight, self._store, self._load, self._move)
        except Exception as again:  # the device is lost: nothing more can be launched
            logger.warning("load job %d failed again: %r", job.job_id, again)
            flight.failed = set(range(len(job)))

    def _load_singly(self, flight: Flight) -> None:
        """The plain path: one position, one page at a time, without kernels or staging."""
        job, rt = flight.job, self._runtime
        rt.wait(self._load, rt.record(rt.current()))
        groups = job.groups().tolist()
        for position in np.flatnonzero(job.sources != NOWHERE).tolist():
            try:
                memory, rows = self._rows.resolve(job.sources[position : position + 1])
            except IndexError as exc:
                logger.debug("load job %d, position %d: %r", job.job_id, position, exc)
                continue
            self._order_rows(flight, self._load, memory, rows)
            self._order_blocks(flight, self._load, job.blocks[position : position + 1])
            row = self._rows.memories[memory[0]][rows[0]].view(torch.int8)
            for page in self._layout.groups[groups[position]]:
                block = self._layout.tensors[page.tensor][job.blocks[position], : page.nbytes]
                self._copy(self._load, block, row[page.offset : page.offset + page.nbytes])
            flight.failed.discard(position)

    def _order_rows(self, flight: Flight, stream: Stream, memory: Indexes, rows: Indexes) -> None:
        """Hold ``stream`` until the jobs that used these rows have ended."""
        for sequence in self._last_use.claim_rows(memory, rows, flight.sequence):
            earlier = self._flights.get(sequence)
            for event in earlier.ends if earlier is not None else ():
                self._runtime.wait(stream, event)

    def _order_blocks(self, flight: Flight, stream: Stream, blocks: Indexes) -> None:
        """Hold ``stream`` until the jobs that used these KV blocks are done with them."""
        for sequence in self._last_use.claim_blocks(blocks, flight.sequence):
            earlier = self._flights.get(sequence)
            for event in earlier.touched if earlier is not None else ():
                self._runtime.wait(stream, event)

    def _copy_pages(
        self, stream: Stream, job: CopyJob, positions: Indexes, addresses: Indexes
    ) -> None:
        to_rows = job.kind is CopyKind.STORE
        blocks, groups = job.blocks[positions], job.groups()[positions]
        self._ring.copy_pages(stream, blocks, groups, addresses, to_rows=to_rows)

    def _copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime.enqueue(stream, partial(target.copy_, source, non_blocking=True))

    def _seal(self, flight: Flight, *streams: Stream) -> None:
        """Record the end of a job; KV blocks are touched on every stream but ``move``."""
        rt = self._runtime
        flight.touched = [rt.record(stream) for stream in streams if stream is not self._move]
        moved = [rt.record(stream) for stream in streams if stream is self._move]
        flight.ends = flight.touched + moved
