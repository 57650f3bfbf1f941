"""The scheduler's own records: jobs in flight and where each request's tokens came from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.engine.ledger import Ledger
from xinference_xavier.engine.receipts import RECENT, Receipts, RequestState
from xinference_xavier.policy.plans import MovePlan, StorePlan
from xinference_xavier.types import Tier

BLOCK = 16


def test_a_job_ends_with_its_last_rank() -> None:
    ledger = Ledger(ranks=3)
    plan = StorePlan([b"k"], [0])
    ledger.open(7, plan, "r")
    assert ledger.acknowledge(7, 1) is None
    ledger.fail(7, frozenset())
    assert len(ledger) == 1
    job = ledger.acknowledge(7, 2)
    assert job is not None
    assert (job.plan, job.req_id, job.failed) == (plan, "r", frozenset())
    assert len(ledger) == 0
    assert ledger.acknowledge(7, 1) is None


def test_failed_positions_of_all_ranks_are_collected() -> None:
    ledger = Ledger(ranks=2)
    ledger.open(0, StorePlan(), "r")
    ledger.open(1, StorePlan(), "s")
    ledger.fail(0, frozenset({1, 4}))
    ledger.fail(0, frozenset({2}))
    job, other = ledger.acknowledge(0, 2), ledger.acknowledge(1, 2)
    assert job is not None
    assert other is not None
    assert job.failed == {1, 2, 4}
    assert other.failed is None


def test_what_is_not_in_flight_is_ignored() -> None:
    ledger = Ledger(ranks=1)
    ledger.fail(3, frozenset({0}))
    assert ledger.acknowledge(3, 1) is None
    assert len(ledger) == 0


def test_moves_count_down_beside_vllms_numbers() -> None:
    ledger = Ledger(ranks=1)
    ledger.open(0, StorePlan())
    assert [ledger.open_move(MovePlan(Tier.CPU)) for _ in range(3)] == [-1, -2, -3]
    assert len(ledger) == 4
    assert ledger.acknowledge(-2, 1) is not None
    assert len(ledger) == 3
    assert ledger.open_move(MovePlan(Tier.GPU)) == -4


@given(
    prompt=st.integers(1, 200),
    engine_blocks=st.integers(0, 12),
    loaded=st.lists(st.sampled_from(Tier), max_size=12),
)
def test_every_receipt_adds_up(prompt: int, engine_blocks: int, loaded: list[Tier]) -> None:
    """The last prompt token is always computed, also when everything was loaded."""
    engine = min(engine_blocks * BLOCK, prompt)
    loaded = loaded[: (prompt - engine) // BLOCK]
    receipts = Receipts(BLOCK)
    receipts.count("r", RequestState(1, prompt=prompt, engine=engine, loaded=loaded))
    (receipt,) = receipts.recent
    parts = (receipt.engine, receipt.gpu, receipt.cpu, receipt.computed)
    assert sum(parts) == receipt.prompt == prompt
    assert min(parts) >= 0
    assert receipt.computed == max(1, prompt - engine - len(loaded) * BLOCK)
    assert receipt.gpu <= loaded.count(Tier.GPU) * BLOCK
    assert receipt.cpu <= loaded.count(Tier.CPU) * BLOCK
    totals = receipts.totals
    assert totals.hits_gpu_blocks + totals.hits_cpu_blocks == len(loaded)
    known = engine // BLOCK + len(loaded)
    assert totals.misses_blocks == max(0, prompt // BLOCK - known)


def test_a_request_counts_once() -> None:
    receipts, state = Receipts(BLOCK), RequestState(1, prompt=40)
    receipts.count("r", state)
    state.loaded = [Tier.GPU]
    receipts.count("r", state)
    assert receipts.totals.requests == 1
    assert receipts.totals.tokens_gpu == 0


def test_only_the_last_receipts_are_kept() -> None:
    receipts = Receipts(BLOCK)
    for number in range(RECENT + 5):
        receipts.count(f"r{number}", RequestState(number, prompt=1))
    assert len(receipts.recent) == RECENT
    assert receipts.recent[-1].request_id == f"r{RECENT + 4}"
    assert receipts.as_dict()["requests"] == RECENT + 5
