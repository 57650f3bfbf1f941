"""Replicas in processes of their own: one is stopped, goes on, is killed and is replaced."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults import LENGTH, HeldReads, answers_again, failures, quiet, remembered_peers
from replica_process import ReplicaProcess
from safetensors.torch import save_file
from shapes import BLOCK, TP2, write_model_config
from sharing_cluster import Cluster, ask, finish, sharing_of, until, usable
from test_bytes import prompt

pytestmark = quiet


@pytest.fixture
def model_config(tmp_path: Path) -> Path:
    """Weights that both processes know to be the same: unknown ones are shared with nobody."""
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    return write_model_config(tmp_path)


def test_a_peer_that_is_stopped_killed_and_replaced(
    quick_cluster: Cluster,
    model_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    shape = replace(TP2, replica=0, tracker=quick_cluster.tracker.address)
    owner = ReplicaProcess(shape, model_config)
    try:
        reader = quick_cluster.add_as(TP2, 1)
        mirror = sharing_of(reader).mirror
        for number in range(1, 6):
            _, keys = owner.answer(prompt(number, LENGTH))

        def knows() -> bool:
            return bool(usable(reader)) and all(mirror.holds(owner.member, key) for key in keys)

        until(knows, "the mirror to follow")
        assert ask(reader, prompt(1, LENGTH)).cached == 5 * BLOCK

        owner.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert ask(reader, prompt(2, LENGTH)).cached == 0
        assert time.monotonic() - began < 2
        assert failures(reader) == {"lease_failed": 1}
        owner.signal(signal.SIGCONT)
        until(knows, "the owner to be met again")
        assert ask(reader, prompt(3, LENGTH)).cached == 5 * BLOCK

        held = HeldReads(reader)
        req_id = reader.ask(prompt(4, LENGTH))
        held.wait()
        # Where its memory can be read without it, nobody says whether it was still leased.
        owner.signal(signal.SIGSTOP)
        held.land()
        finish(reader)
        assert reader.asked[req_id].cached == 0
        assert failures(reader) in (
            {"lease_failed": 1, "lease_lost": 1},
            {"lease_failed": 1, "timed_out": 1},
        )
        owner.signal(signal.SIGCONT)
        until(lambda: owner.leases() == 0, "the lease to be released or to end")

        held = HeldReads(reader)
        until(knows, "the owner to be met again")
        req_id = reader.ask(prompt(5, LENGTH))
        held.wait()
        with remembered_peers(reader):
            owner.kill()
            held.land()
            finish(reader)
        assert reader.asked[req_id].cached == 0
        assert failures(reader)["read_failed"] == 1
        fetches = reader.manager.planner.fetches
        until(lambda: not fetches.quarantined_rows, "late bytes to land")
        assert usable(reader) == ()
    finally:
        owner.close()
    successor = quick_cluster.add_as(TP2, 0)
    answers_again(quick_cluster, successor, reader, 6)
    assert owner.member not in mirror.members()
    assert caplog.text.count("cannot be read from") in (2, 3)
