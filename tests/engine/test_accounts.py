"""What the cache saves and costs: the formula on a clock of our own, then on vLLM's scheduler."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from faults import LENGTH, HeldReads, both_shapes, owner_and_reader, quiet, steps
from gated_copier import ALL
from harness import MakeReplica, Replica
from shapes import BLOCK, HYBRID, TP2, Shape
from sharing_cluster import Cluster, finish
from test_bytes import prompt

from xinference_xavier.engine import accounts as accounts_module
from xinference_xavier.engine.accounts import ENDS_KEPT, SLOWING_ON_CPU, SLOWING_ON_GPU, Accounts
from xinference_xavier.engine.messages import Copied
from xinference_xavier.engine.receipts import RequestState, Totals

COPIED = {"store": Copied(1, 10, 4.0), "load": Copied(1, 10, 8.0), "move": Copied(1, 10, 2.0)}
HELD_SECONDS = 0.1


class Books(Accounts):
    """Accounts whose clock and speed the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.token_seconds: float | None = None
        super().__init__(lambda: self.token_seconds, lambda: self.now)


def test_tokens_are_priced_at_the_speed_of_their_time() -> None:
    books = Books()
    books.price(Totals(tokens_gpu=100, tokens_engine=999, tokens_computed=999))
    assert books.saved_seconds == 0  # nothing was measured yet
    books.token_seconds = 0.01
    books.price(Totals(tokens_gpu=100, tokens_cpu=50))
    assert books.saved_seconds == pytest.approx(1.5)
    books.token_seconds = 0.02
    books.price(Totals(tokens_gpu=100, tokens_cpu=50, tokens_peer=10))
    books.price(Totals(tokens_gpu=100, tokens_cpu=50, tokens_peer=10))
    assert books.saved_seconds == pytest.approx(1.7)
    assert books.as_dict({}, 1)["prefill_tokens_per_second"] == 50


def test_a_wait_is_shared_out_between_reading_and_loading() -> None:
    books = Books()
    books.now = 110.0
    books.waited(108.0, ())
    assert (books.load_wait_seconds, books.fetch_wait_seconds) == (2.0, 0.0)
    for number, (end, failed) in enumerate([(111.0, False), (114.0, False), (113.0, True)]):
        books.now = end
        books.fetch_ended(number, failed)
    books.now = 115.0
    books.waited(110.0, (0, 1))
    assert (books.load_wait_seconds, books.fetch_wait_seconds) == (3.0, 4.0)
    books.waited(110.0, (2,))
    assert (books.load_wait_seconds, books.failed_fetch_seconds) == (5.0, 3.0)
    books.waited(114.5, (0,))  # it had ended before: nobody waited for it
    assert (books.load_wait_seconds, books.fetch_wait_seconds) == (5.5, 4.0)
    books.waited(114.0, (99,))  # still under way
    assert (books.load_wait_seconds, books.fetch_wait_seconds) == (5.5, 5.0)


def test_a_load_that_fails_before_its_fetch_is_told_of_waited_for_a_failed_fetch() -> None:
    books = Books()
    books.waited(98.0, (7,), failed=True)
    assert (books.failed_fetch_seconds, books.fetch_wait_seconds) == (2.0, 0.0)
    books.fetch_ended(8, failed=False)
    books.waited(97.0, (8,), failed=True)  # the copy failed, not the fetch
    assert (books.failed_fetch_seconds, books.fetch_wait_seconds) == (2.0, 3.0)


def test_a_lookup_that_is_put_off_counts_from_the_first_time() -> None:
    books, state = Books(), RequestState(1)
    books.resume(state)
    books.defer(state)
    books.now += 3
    books.defer(state)
    books.now += 1
    books.resume(state)
    books.resume(state)
    assert books.load_wait_seconds == 4.0
    state.fetch_id = 7
    books.defer(state)
    books.now += 2
    books.fetch_ended(7, failed=True)
    books.resume(state)
    assert (books.load_wait_seconds, books.failed_fetch_seconds) == (4.0, 2.0)


def test_net_is_what_was_saved_less_every_cost() -> None:
    books = Books()
    books.saved_seconds, books.load_wait_seconds, books.scheduler_seconds = 10.0, 1.0, 0.5
    books.fetch_wait_seconds, books.failed_fetch_seconds = 0.25, 0.125
    told = books.as_dict(COPIED, ranks=2)
    assert told["copy_seconds"] == 3.0
    assert told["net_seconds"] == pytest.approx(10 - 1 - 0.5 - 0.25 - 0.125 - 3)
    books.slowing = SLOWING_ON_GPU
    assert books.as_dict(COPIED, ranks=2)["copy_seconds"] == 2.0
    assert told["prefill_tokens_per_second"] is None


def test_ends_that_nobody_asks_for_do_not_pile_up() -> None:
    books = Books()
    for number in range(2 * ENDS_KEPT):
        books.fetch_ended(number, False)
    assert len(books._ends) == ENDS_KEPT


def seconds(replica: Replica) -> dict[str, float]:
    told: dict[str, float] = replica.connector._stats.collect()["accounts"]
    return told


@pytest.mark.parametrize("shape", [TP2, HYBRID], ids=["tp2", "hybrid"])
def test_loaded_tokens_are_worth_the_measured_prefill(
    make_replica: MakeReplica, shape: Shape
) -> None:
    replica = make_replica(replace(shape, batch_tokens=96, blocks=61))
    assert replica.manager.accounts.slowing == SLOWING_ON_CPU
    replica.answer(prompt(0, 80))
    assert replica.manager.fetching.rates.token_seconds is not None
    replica.forget()
    assert seconds(replica)["saved_seconds"] == 0
    replica.answer(prompt(0, 80))
    loaded = replica.connector._stats.collect()["counters"]
    tokens = loaded["tokens_gpu"] + loaded["tokens_cpu"]
    assert tokens > 0
    told = seconds(replica)
    assert told["saved_seconds"] == pytest.approx(
        tokens / told["prefill_tokens_per_second"], rel=0.01, abs=1e-5
    )
    assert 0 < told["load_wait_seconds"] < 10
    assert 0 < told["copy_seconds"] < 10
    assert 0 < told["scheduler_seconds"] < 10
    assert told["fetch_wait_seconds"] == told["failed_fetch_seconds"] == 0


def test_a_slow_load_is_a_wait_and_a_store_that_nobody_waits_for_is_none(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(TP2)
    replica.ranks[0].copier.gate.run = 0
    replica.ask(prompt(0, 5 * BLOCK))
    steps(replica, 3)
    time.sleep(HELD_SECONDS)
    replica.run()
    assert seconds(replica)["load_wait_seconds"] == 0
    replica.forget()
    replica.ranks[0].copier.gate.run = 0
    replica.ask(prompt(0, 5 * BLOCK))
    steps(replica, 3)
    time.sleep(HELD_SECONDS)
    replica.run()
    assert HELD_SECONDS <= seconds(replica)["load_wait_seconds"] < 5


def test_waiting_for_a_block_that_is_being_written_is_a_wait(make_replica: MakeReplica) -> None:
    replica = make_replica(TP2)
    for rank in replica.ranks:
        rank.copier.gate.run = 0
    replica.ask(prompt(0, 5 * BLOCK))
    steps(replica, 3)
    replica.forget()
    replica.ask([*prompt(0, 5 * BLOCK), 1])
    steps(replica, 2)
    time.sleep(HELD_SECONDS)
    for rank in replica.ranks:
        rank.copier.gate.run = ALL
    replica.run()
    assert HELD_SECONDS <= seconds(replica)["load_wait_seconds"] < 5


@quiet
@both_shapes
@pytest.mark.parametrize("lands", [True, False], ids=["lands", "fails"])
def test_waiting_for_a_peer_is_told_by_its_outcome(
    quick_cluster: Cluster, shape: Shape, lands: bool
) -> None:
    _, reader = owner_and_reader(quick_cluster, shape)
    held = HeldReads(reader, 1)
    reader.ask(prompt(1, LENGTH))
    steps(reader, 3)
    held.wait()
    time.sleep(HELD_SECONDS)
    if lands:
        held.land()
    else:
        held.fail()
        held.go_on()
    finish(reader)
    told = seconds(reader)
    waited, other = ("fetch_wait_seconds", "failed_fetch_seconds")[:: 1 if lands else -1]
    assert HELD_SECONDS <= told[waited] < 5
    assert told[other] == 0
    assert told["net_seconds"] < 0
    sharing = reader.connector._stats.collect()
    fetched = sharing["counters"]["fetched"] * sharing["row_bytes"]
    assert sharing["sharing"]["fetched_bytes"] == fetched
    assert bool(fetched) is lands


def test_a_method_is_timed_whether_it_returns_or_raises() -> None:
    ticks = itertools.count()
    books = Accounts(lambda: 0.001, clock=lambda: float(next(ticks)))

    class Connector:
        _manager = type("Manager", (), {"accounts": books})

        @accounts_module.accounted
        def divide(self, by: int) -> float:
            return 1 / by

    connector = Connector()
    assert connector.divide(2) == 0.5
    assert books.scheduler_seconds == 1.0
    with pytest.raises(ZeroDivisionError):
        connector.divide(0)
    assert books.scheduler_seconds == 2.0


def test_only_so_many_ends_of_fetches_are_kept() -> None:
    books = Accounts(lambda: 0.001)
    for fetch_id in range(3 * accounts_module.ENDS_KEPT):
        books.fetch_ended(fetch_id, failed=False)
    assert len(books._ends) == accounts_module.ENDS_KEPT
