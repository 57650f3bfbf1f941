"""Where a location lies in the descriptor lists of both sides; NIXL merges what adjoins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xinference_xavier.storage.rank_memory import ExtentMemory, RowTable, extents_of, plan
from xinference_xavier.storage.slab import Slab

ROW_BYTES = 4096

#: A GPU tier in two extents on a device, a CPU tier in two extents.
GPU_0 = ExtentMemory(0, 0, 10, 0x10000, 3, "VRAM")
GPU_1 = ExtentMemory(0, 10, 5, 0x90000, 3, "VRAM")
CPU_0 = ExtentMemory(1, 0, 4, 0x20000, 0, "DRAM")
CPU_1 = ExtentMemory(1, 4, 6, 0x70000, 0, "DRAM")
ON_GPU = RowTable([GPU_0, CPU_1, GPU_1, CPU_0], ROW_BYTES)
ON_CPU = RowTable([ExtentMemory(0, 0, 10, 0x100, 0, "DRAM"), CPU_0, CPU_1], ROW_BYTES)


def address(table: RowTable, memory_type: str, index: int) -> int:
    """Address of a descriptor, as NIXL counts through a strided list."""
    for start, _, _, stride, rows in table.descriptors(memory_type).tolist():
        if index < rows:
            return start + index * stride
        index -= rows
    raise AssertionError("index beyond the list")


def addresses(table: RowTable, locations: list[int]) -> list[tuple[str, int]]:
    kinds, indexes = table.resolve(np.array(locations, np.int64))
    types = [table.memory_types[kind] for kind in kinds]
    return [(t, address(table, t, i)) for t, i in zip(types, indexes.tolist(), strict=True)]


def test_every_location_is_found_at_its_address() -> None:
    assert addresses(ON_GPU, [0, 9, 10, 14, ~0, ~3, ~4, ~9]) == [
        ("VRAM", 0x10000),
        ("VRAM", 0x10000 + 9 * ROW_BYTES),
        ("VRAM", 0x90000),
        ("VRAM", 0x90000 + 4 * ROW_BYTES),
        ("DRAM", 0x20000),
        ("DRAM", 0x20000 + 3 * ROW_BYTES),
        ("DRAM", 0x70000),
        ("DRAM", 0x70000 + 5 * ROW_BYTES),
    ]
    assert addresses(ON_CPU, [9, ~9]) == [
        ("DRAM", 0x100 + 9 * ROW_BYTES),
        ("DRAM", 0x70000 + 5 * ROW_BYTES),
    ]


@pytest.mark.parametrize("location", [15, ~10, -(2**62), 2**62])
def test_locations_outside_are_refused(location: int) -> None:
    with pytest.raises(IndexError, match=f"location {location} is in no slab"):
        ON_GPU.resolve(np.array([0, location], np.int64))


def test_a_read_is_split_into_pieces_in_its_order() -> None:
    targets, sources = np.array([0, ~0, 1, ~1, 2]), np.array([~2, 4, 5, ~3, 1])
    pieces = list(plan(ON_CPU, targets, ON_CPU, sources, 2))
    assert [t.targets.tolist() for t in pieces] == [[0, ~0], [1, ~1], [2]]
    (whole,) = plan(ON_CPU, targets, ON_CPU, sources, 5)
    for side in ("own", "peer"):
        joined = np.concatenate([getattr(t, side) for t in pieces])
        assert joined.tolist() == getattr(whole, side).tolist()


def test_a_read_is_one_transfer_per_pair_of_memory_types() -> None:
    targets, sources = np.array([0, ~0, 1, ~1]), np.array([~2, 4, 5, ~3])
    same = list(plan(ON_CPU, targets, ON_CPU, sources, 9))
    assert [(t.own_type, t.peer_type, len(t.own)) for t in same] == [("DRAM", "DRAM", 4)]
    mixed = {(t.own_type, t.peer_type): t for t in plan(ON_GPU, targets, ON_GPU, sources, 9)}
    assert mixed.keys() == {(a, b) for a in ("VRAM", "DRAM") for b in ("VRAM", "DRAM")}
    pairs = {
        (address(ON_GPU, own_type, own), address(ON_GPU, peer_type, peer))
        for (own_type, peer_type), t in mixed.items()
        for own, peer in zip(t.own.tolist(), t.peer.tolist(), strict=True)
    }
    own_side, peer_side = addresses(ON_GPU, targets.tolist()), addresses(ON_GPU, sources.tolist())
    assert pairs == {(o[1], p[1]) for o, p in zip(own_side, peer_side, strict=True)}


def test_extents_name_the_tier_and_the_kind_of_memory() -> None:
    device, host = Slab(3, ROW_BYTES, "cpu"), Slab(5, ROW_BYTES, "cpu")
    assert extents_of(device, host) == (
        ExtentMemory(0, 0, 3, device.extents[0].address, 0, "DRAM"),
        ExtentMemory(1, 0, 5, host.extents[0].address, 0, "DRAM"),
    )
    assert extents_of(None, None) == ()


def test_nixl_reads_neighbours_as_one_piece() -> None:
    nixl = pytest.importorskip("nixl._bindings")
    memory = torch.zeros(2, 16, ROW_BYTES, dtype=torch.uint8)
    memory[0] = torch.arange(16)[:, None]
    sides = [ExtentMemory(0, 0, 16, half.data_ptr(), 0, "DRAM") for half in memory]
    config = nixl.nixlAgentConfig()
    config.captureTelemetry = True
    agent = nixl.nixlAgent("merging", config)
    backends = [agent.createBackend("UCX", {})]
    region = [(memory.data_ptr(), memory.numel(), 0, "")]
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, region), backends)
    source, target = (
        agent.prepXferDlist(
            name, nixl.DRAM_SEG, RowTable([side], ROW_BYTES).descriptors("DRAM"), backends
        )
        for name, side in zip(("merging", nixl.NIXL_INIT_AGENT), sides, strict=True)
    )
    for rows, pieces in (([4, 5, 6, 7], 1), ([0, 1, 8, 9, 15], 3)):
        index = np.array(rows, np.int32)
        handle = agent.makeXferReq(nixl.NIXL_READ, target, index, source, index, "", backends)
        status = agent.postXferReq(handle, "")
        while status == nixl.NIXL_IN_PROG:
            status = agent.getXferStatus(handle)
        assert agent.getXferTelemetry(handle).descCount == pieces
        assert torch.equal(memory[1, rows], memory[0, rows])
        agent.releaseXferReq(handle)
