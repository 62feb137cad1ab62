"""One round is decided ahead of the disk, and none while it refuses."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gspo_services.broker.ledger import Reshelve
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.rounds import MAX_BYTES_PER_COMMIT, MAX_EVENTS_PER_COMMIT, Committer, NextRound
from gspo_services.broker.rows import CheckpointedRow
from gspo_services.broker.store import RowChanges, Store, StoreUnavailable
from gspo_services.shared.runtime.telemetry import Health
from tests.support.clocks import VirtualClock


def has_room(rounds: NextRound) -> bool:
    """Whether more may be decided now."""
    waiting = rounds.room()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


async def test_what_is_decided_while_a_round_is_committed_is_in_the_next_one() -> None:
    rounds = NextRound()
    rounds.open.changes.lines.append({"event": "first"})
    rounds.add(3, 100)
    rounds.decided(1)
    first = rounds.take_now()
    assert has_room(rounds)
    rounds.open.changes.lines.append({"event": "second"})
    rounds.decided(0)
    rounds.done()
    second = rounds.take_now()
    assert [round_.changes.lines for round_ in (first, second)] == [[{"event": "first"}], [{"event": "second"}]]
    assert (first.num_events, second.num_events) == (3, 1)


async def test_a_full_round_is_taken_before_more_is_decided_and_time_fills_it_too() -> None:
    rounds = NextRound()
    assert rounds.add(MAX_EVENTS_PER_COMMIT - 2, 1)
    rounds.decided(0)
    assert has_room(rounds)
    rounds.decided(0)
    assert not has_room(rounds)
    rounds.take_now()
    assert has_room(rounds)


async def test_a_round_is_full_by_its_bytes_too() -> None:
    rounds = NextRound()
    assert rounds.add(1, MAX_BYTES_PER_COMMIT - 1)
    assert not rounds.add(1, 1)
    rounds.decided(2)
    assert not has_room(rounds)
    assert rounds.take_now().num_bytes == MAX_BYTES_PER_COMMIT
    assert has_room(rounds)


async def test_nothing_is_decided_until_an_effect_has_read_the_ledger_back() -> None:
    rounds = NextRound()
    rounds.open.effects.append(Reshelve())
    rounds.decided(0)
    assert not has_room(rounds)
    rounds.take_now()
    assert not has_room(rounds)
    rounds.done()
    assert has_room(rounds)


async def test_a_round_is_taken_when_something_was_decided() -> None:
    rounds = NextRound()
    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(rounds.take(), name="take")
        await asyncio.sleep(0)
        assert not taking.done()
        rounds.decided(0)
    assert taking.result().num_events == 1


class RefusingStore(Store):
    """Refuses the first commits."""

    def __init__(self, num_refusals: int, saw: Callable[[], None]) -> None:
        super().__init__(Path(":memory:"), fingerprint="f", run_id="r")
        self._num_refusals = num_refusals
        self._saw = saw

    def commit(self, changes: RowChanges) -> None:
        self._saw()
        if self._num_refusals:
            self._num_refusals -= 1
            raise StoreUnavailable("full")
        super().commit(changes)


async def in_loop(function: Callable[[], Any]) -> None:
    function()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_refused_commit_is_tried_again_and_nothing_is_decided_meanwhile(
    monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr("gspo_services.broker.rounds.RETRY_FIRST_S", 0.001)
    rounds, stop = NextRound(), asyncio.Event()
    seen: list[bool] = []
    clock = VirtualClock()
    with RefusingStore(2, lambda: seen.append(has_room(rounds))) as store:
        committer = Committer(store, in_loop, rounds, BrokerMetrics(CollectorRegistry()), Health(clock, 1.0), clock)
        if stops:
            stop.set()
        made = await committer.commit(RowChanges(rows=[CheckpointedRow(next_batch=3)]), stop)
        assert made is not stops
        assert seen == ([True] if stops else [True, False, False])
        assert not has_room(rounds)
        assert store.newest.number == int(made)
    rounds.done()
    assert has_room(rounds)
