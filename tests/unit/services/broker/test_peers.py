"""Sessions: who replaces whom, who is forgotten, how many there may be."""

import pytest

from services.broker.actions import Who
from services.broker.peers import MAX_PEERS, SILENT_S, Peers, SessionRefused


def test_a_newer_session_of_a_rollout_replaces_the_older_for_good() -> None:
    peers = Peers()
    old, new = Who("r", "1"), Who("r", "2")
    assert peers.hello(old, "rollout", 0, 0.0) == []
    assert peers.hello(Who("other", "1"), "rollout", 0, 0.0) == []
    assert peers.hello(new, "rollout", 0, 1.0) == [old]
    assert peers.get(old) is None
    with pytest.raises(SessionRefused, match="session 1 of r was replaced by a newer one"):
        peers.hello(old, "rollout", 0, 2.0)


def test_there_is_one_learner_whatever_it_is_called() -> None:
    peers = Peers()
    peers.hello(Who("learner-0", "1"), "learner", 0, 0.0)
    assert peers.hello(Who("learner-1", "1"), "learner", 0, 0.0) == [Who("learner-0", "1")]
    assert [peer.who.peer for peer in peers.of_role("learner")] == ["learner-1"]


def test_operators_do_not_disturb_each_other() -> None:
    peers = Peers()
    assert peers.hello(Who("operator", "1"), "operator", 0, 0.0) == []
    assert peers.hello(Who("operator", "2"), "operator", 0, 0.0) == []
    assert len(peers.of_role("operator")) == 2


def test_a_repeated_hello_of_one_session_keeps_its_place_in_the_sequence() -> None:
    peers = Peers()
    who = Who("r", "1")
    peers.hello(who, "rollout", 7, 0.0)
    peer = peers.get(who)
    assert peer is not None
    assert peer.inbox.offer(7)
    peers.hello(who, "rollout", 7, 1.0)
    assert not peer.inbox.offer(7)
    assert peers.get(who) is peer


def test_silent_rollouts_and_operators_are_forgotten_and_a_silent_learner_is_not() -> None:
    peers = Peers()
    peers.hello(Who("r", "1"), "rollout", 0, 0.0)
    peers.hello(Who("l", "1"), "learner", 0, 0.0)
    peers.hello(Who("fresh", "1"), "rollout", 0, SILENT_S)
    assert peers.prune(SILENT_S) == []
    assert peers.prune(SILENT_S + 1) == [Who("r", "1")]
    assert peers.hello(Who("r", "1"), "rollout", 3, SILENT_S + 2) == [], "it may come back"


def test_the_number_of_peers_is_bounded() -> None:
    peers = Peers()
    for number in range(MAX_PEERS):
        peers.hello(Who(f"r{number}", "1"), "rollout", 0, 0.0)
    with pytest.raises(SessionRefused, match="4096 allowed"):
        peers.hello(Who("one more", "1"), "rollout", 0, 0.0)
