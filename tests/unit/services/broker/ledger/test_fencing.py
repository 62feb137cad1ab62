"""Sessions: which replace others, which are forgotten, how many there may be."""

import pytest

from gspo_protocol.messages import Role
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.ledger.fencing import LEARNER_LEASE_S, SILENT_S, Owner, Peers, PlaceTaken, SessionRefused


def test_a_newer_session_of_a_rollout_replaces_the_older_for_good() -> None:
    peers = Peers(0.0)
    old, new = SessionKey("r", "1"), SessionKey("r", "2")
    assert peers.hello(old, "rollout", 0, 0.0) == []
    assert peers.hello(SessionKey("other", "1"), "rollout", 0, 0.0) == []
    assert peers.hello(new, "rollout", 0, 1.0) == [old]
    assert peers.get(old) is None
    with pytest.raises(SessionRefused, match=f"session {old.tag} of r was replaced by a newer one"):
        peers.hello(old, "rollout", 0, 2.0)


A, B = SessionKey("learner", "a"), SessionKey("learner", "b")


def pass_time(peers: Peers, begin: float, end: float, *, speaking: SessionKey | None = None) -> None:
    """The broker listens, and hears ``speaking`` four times a second."""
    now = begin
    while now < end:
        now = min(end, now + 0.25)
        peers.listen(now)
        peer = None if speaking is None else peers.get(speaking)
        if peer is not None:
            peers.hear(peer, now)


def test_a_second_learner_is_told_which_one_has_the_run_while_that_one_lives() -> None:
    peers = Peers(0.0)
    peers.hello(A, "learner", 0, 0.0)
    pass_time(peers, 0.0, 60.0, speaking=A)
    pass_time(peers, 60.0, 61.5)
    reason = rf"session {A.tag} \(learner\) has this run and was heard 1.5 s ago.*says nothing for 5 s"
    with pytest.raises(PlaceTaken, match=reason):
        peers.hello(B, "learner", 0, 61.5)
    assert [peer.key for peer in peers.of_role("learner")] == [A]
    assert peers.turned_away == (B, 61.5)
    assert peers.get(B) is None


@pytest.mark.parametrize(("silent_s", "takes_over"), [(LEARNER_LEASE_S - 0.25, False), (LEARNER_LEASE_S, True)])
def test_a_learner_that_is_silent_for_a_lease_is_replaced_for_good(silent_s: float, takes_over: bool) -> None:
    peers = Peers(0.0)
    peers.hello(A, "learner", 0, 0.0)
    pass_time(peers, 0.0, silent_s)
    if not takes_over:
        with pytest.raises(PlaceTaken):
            peers.hello(B, "learner", 0, silent_s)
        return
    assert peers.hello(B, "learner", 0, silent_s) == [A]
    assert peers.learner == B
    with pytest.raises(SessionRefused, match=f"session {A.tag} of learner was replaced by a newer one"):
        peers.hello(A, "learner", 0, silent_s + 1)


def test_there_is_one_learner_whatever_its_name() -> None:
    peers = Peers(0.0)
    peers.hello(SessionKey("learner-0", "1"), "learner", 0, 0.0)
    with pytest.raises(PlaceTaken):
        peers.hello(SessionKey("learner-1", "1"), "learner", 0, 0.0)


def test_time_in_which_the_broker_did_not_listen_does_not_count_against_the_learner() -> None:
    peers = Peers(0.0)
    peers.hello(A, "learner", 0, 0.0)
    pass_time(peers, 0.0, 4.0)
    peers.listen(600.0)  # a broker that was stopped finds the second one's Hello before what the first one said
    with pytest.raises(PlaceTaken):
        peers.hello(B, "learner", 0, 600.0)
    pass_time(peers, 600.0, 601.0)
    assert peers.hello(B, "learner", 0, 601.0) == [A]


def test_a_learner_that_said_goodbye_is_followed_at_once() -> None:
    peers = Peers(0.0)
    peers.hello(A, "learner", 0, 0.0)
    peers.leave(A)
    assert peers.hello(B, "learner", 0, 0.1) == []


def test_the_learner_of_the_last_broker_comes_back_before_another_one() -> None:
    peers = Peers(1000.0, A)
    with pytest.raises(PlaceTaken, match=f"session {A.tag}"):
        peers.hello(B, "learner", 0, 1000.1)
    assert peers.hello(A, "learner", 7, 1001.0) == []
    peers = Peers(1000.0, A)
    pass_time(peers, 1000.0, 1005.0)
    assert peers.hello(B, "learner", 0, 1005.0) == [A]
    with pytest.raises(SessionRefused):
        peers.hello(A, "learner", 7, 1005.5)


def test_operators_do_not_disturb_each_other() -> None:
    peers = Peers(0.0)
    assert peers.hello(SessionKey("operator", "1"), "operator", 0, 0.0) == []
    assert peers.hello(SessionKey("operator", "2"), "operator", 0, 0.0) == []
    assert len(peers.of_role("operator")) == 2


def test_a_repeated_hello_of_one_session_keeps_its_place_in_the_sequence() -> None:
    peers = Peers(0.0)
    sender = SessionKey("r", "1")
    peers.hello(sender, "rollout", 7, 0.0)
    peer = peers.get(sender)
    assert peer is not None
    assert peer.inbox.offer(7)
    peers.hello(sender, "rollout", 7, 1.0)
    assert not peer.inbox.offer(7)
    assert peers.get(sender) is peer


def test_silent_rollouts_and_operators_are_forgotten_and_a_silent_learner_is_not() -> None:
    peers = Peers(0.0)
    peers.hello(SessionKey("r", "1"), "rollout", 0, 0.0)
    peers.hello(SessionKey("l", "1"), "learner", 0, 0.0)
    peers.hello(SessionKey("fresh", "1"), "rollout", 0, SILENT_S)
    assert peers.prune(SILENT_S) == []
    assert [peer.key for peer in peers.prune(SILENT_S + 1)] == [SessionKey("r", "1")]
    assert peers.hello(SessionKey("r", "1"), "rollout", 3, SILENT_S + 2) == [], "it may come back"


def test_a_learner_that_speaks_to_a_restarted_broker_before_its_hello_counts_as_alive() -> None:
    peers = Peers(0.0, A)
    pass_time(peers, 0.0, 4.0)
    peers.hear_stranger(b"learner/a")
    peers.hear_stranger(b"somebody/else")
    pass_time(peers, 4.0, 5.5)
    with pytest.raises(PlaceTaken, match=r"was heard 1\.5 s ago"):
        peers.hello(B, "learner", 0, 5.5)


@pytest.mark.parametrize(("role", "owner"), [("operator", b"k"), ("learner", b"k"), ("rollout", b"l"), ("rollout", b"")])
def test_a_session_cannot_be_taken_with_another_role_or_key(role: Role, owner: bytes) -> None:
    peers = Peers(0.0)
    sender = SessionKey("r", "1")
    peers.hello(sender, "rollout", 0, 0.0, Owner(b"k"))
    with pytest.raises(SessionRefused, match=f"session {sender.tag} of r belongs to"):
        peers.hello(sender, role, 0, 1.0, Owner(owner))
    peer = peers.get(sender)
    assert peer is not None
    assert (peer.role, peer.owner.key, peer.last_seen) == ("rollout", b"k", 0.0)
    assert peers.hello(sender, "rollout", 0, 2.0, Owner(b"k")) == [], "its owner continues"


def test_nobody_takes_the_learners_place_under_another_role_while_it_is_away() -> None:
    peers = Peers(0.0, A)
    with pytest.raises(SessionRefused, match="belongs to the role learner, not to operator"):
        peers.hello(A, "operator", 0, 0.5)
    assert peers.hello(A, "learner", 0, 1.0) == []
