"""The run's log in a real PostgreSQL."""

import pytest

from gspo_services.broker.standby.database import LeadershipLost, claim, leader_of, release
from gspo_services.broker.store.commits import first_commit
from tests.support.postgres.fixtures import SynchronousDatabase
from tests.support.postgres.logs import opened_log


def test_what_is_appended_is_read_back_in_order_and_once(postgres: SynchronousDatabase, schema: str) -> None:
    log = opened_log(postgres, schema)
    first = first_commit("run")
    one = first.next([1, 2], chunks=2, tokens=7)
    two = one.next([3])
    log.append(one, first, b"first")
    log.append(two, one, b"second")
    log.append(two, one, b"second")
    assert log.after(0, 9) == [(one, b"first"), (two, b"second")]
    assert log.after(1, 9) == [(two, b"second")]
    assert log.after(0, 1) == [(one, b"first")]
    assert (log.newest(), log.confirmed) == (two, 2)
    log.database.close()


def test_of_two_that_both_think_they_lead_only_the_later_one_can_commit(postgres: SynchronousDatabase, schema: str) -> None:
    former, first = opened_log(postgres, schema, holder="former"), first_commit("run")
    later = opened_log(postgres, schema, holder="later")
    with pytest.raises(LeadershipLost, match=r"led by later \(epoch 2\), and this broker had epoch 1: nothing of what"):
        former.append(first.next([1]), first, b"former")
    with pytest.raises(LeadershipLost, match="led by later"):
        former.renew()
    later.append(first.next([2]), first, b"later")
    assert later.after(0, 9) == [(first.next([2]), b"later")]
    with pytest.raises(LeadershipLost, match="led by later"):
        former.append(first.next([1]), first, b"former")
    for log in (former, later):
        log.database.close()


def test_the_place_of_a_leader_that_has_renewed_meanwhile_is_not_taken_and_one_given_up_is(
    postgres: SynchronousDatabase, schema: str
) -> None:
    leader = opened_log(postgres, schema, holder="leader")
    seen = leader_of(leader.database)
    assert (seen.epoch, seen.holder, seen.released) == (1, "leader", False)
    leader.renew()
    assert claim(leader.database, seen, "standby") is None
    release(leader.database, leader.epoch)
    seen = leader_of(leader.database)
    assert seen.released
    with pytest.raises(LeadershipLost, match=r"led by nobody \(leader gave it up\), and this broker had epoch 1"):
        leader.append(first_commit("run").next([1]), first_commit("run"), b"late")
    assert claim(leader.database, seen, "standby") == 2
    assert not leader_of(leader.database).released
    leader.database.close()
