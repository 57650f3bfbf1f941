"""The CUDA copier against streams that run in every order its waits allow."""

from __future__ import annotations

import random

import pytest
from rig import NUM_BLOCKS, ROWS, Rig

from xinference_xavier.storage import cuda_buffers
from xinference_xavier.storage.copier import CopyJob
from xinference_xavier.storage.cuda_copier import CudaCopier

LOCATIONS = [*range(ROWS), *(~row for row in range(ROWS))]


@pytest.fixture
def tight_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers so small that jobs take several pieces and launches, and buffers run out."""
    monkeypatch.setattr(cuda_buffers, "STAGING_BYTES", 8 * 192)  # four pieces of two rows
    monkeypatch.setattr(cuda_buffers, "RING_POSITIONS", 3)


class Model:
    """What the bytes must be if jobs ran one after the other."""

    def __init__(self, rig: Rig) -> None:
        self.blocks = {block: rig.block_pages(block) for block in range(NUM_BLOCKS)}
        self.rows = {at: rig.row_pages(at) for at in LOCATIONS}

    def check(self, rig: Rig) -> None:
        assert self.blocks == {block: rig.block_pages(block) for block in self.blocks}
        assert self.rows == {at: rig.row_pages(at) for at in self.rows}

    def random_job(self, rig: Rig, choose: random.Random) -> CopyJob:
        """A job on random rows and blocks, already applied to the model."""
        count = choose.randint(1, 7)
        blocks = choose.sample(range(NUM_BLOCKS), count)
        places = choose.sample(LOCATIONS, 2 * count)
        if choose.random() < 0.5:  # as often runs as scattered
            blocks.sort()
            places.sort()
            choose.shuffle(halves := [places[:count], places[count:]])
            places = halves[0] + halves[1]
        sources, targets = places[:count], places[count:]
        kind = choose.choice(["store", "load", "move"])
        if kind == "store":
            self.rows |= {at: self.blocks[b] for at, b in zip(targets, blocks, strict=True)}
            return rig.store(blocks, targets)
        if kind == "load":
            self.blocks |= {b: self.rows[at] for at, b in zip(sources, blocks, strict=True)}
            return rig.load(blocks, sources)
        self.rows |= {to: self.rows[at] for at, to in zip(sources, targets, strict=True)}
        return rig.move(sources, targets)


@pytest.mark.usefixtures("tight_buffers")
@pytest.mark.parametrize("seed", range(60))
def test_jobs_in_flight_together_end_as_if_run_in_order(seed: int) -> None:
    rig, choose = Rig("simulated", seed=seed), random.Random(seed)
    model, submitted, ended = Model(rig), 0, 0
    for _ in range(40):
        rig.copier.submit(model.random_job(rig, choose))
        submitted += 1
        if choose.random() < 0.2:
            results = rig.copier.poll()
            assert all(result.ok for result in results)
            ended += len(results)
    assert rig.runtime is not None
    assert rig.runtime.host_waits == 0
    results_left = rig.collect(submitted - ended)
    assert all(result.ok for result in results_left.values())
    rig.runtime.drain()
    model.check(rig)
    rig.close()


@pytest.mark.usefixtures("tight_buffers")
def test_the_index_ring_grows_to_the_depth_of_the_queue_and_stays() -> None:
    rig = Rig("simulated", seed=3)
    assert isinstance(rig.copier, CudaCopier)
    for _ in range(3):
        rig.run(*(rig.store(range(6), range(6)) for _ in range(40)))
    grown = rig.copier._ring.grown
    assert 0 < grown <= 80  # 40 jobs of two launches; later rounds reuse the buffers
    rig.close()


@pytest.mark.usefixtures("tight_buffers")
def test_a_gather_does_not_wait_for_unrelated_copies_over_the_bus() -> None:
    """vLLM's flush waits for the gather only: a demotion in flight must not hold it up."""
    rig = Rig("simulated", seed=1)
    runtime, copier = rig.runtime, rig.copier
    assert runtime is not None
    assert isinstance(copier, CudaCopier)
    move = rig.move([8, 9], [~8, ~9])
    copier.submit(move)
    held = copier._move.queue.copy()
    copier._move.queue.clear()  # the bus is busy for as long as we like
    store = rig.store([1, 2], [1, 2])
    copier.submit(store)
    copier.wait({store.job_id, move.job_id})
    reached: list[bool] = []
    rig.compute(lambda: reached.append(True))
    runtime.drain()
    assert reached == [True]
    copier._move.queue.extend(held)
    assert set(rig.collect(2)) == {move.job_id, store.job_id}
    rig.close()
