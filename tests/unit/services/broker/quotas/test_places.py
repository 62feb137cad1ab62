"""How many sessions there may be, who keeps its place, and who always gets one."""

import pytest

from gspo_protocol.limits import MAX_OPERATORS, MAX_OPERATORS_PER_KEY, MAX_PEERS, MAX_ROLLOUTS_PER_KEY
from gspo_protocol.messages import Role
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.ledger.fencing import Owner, Peers
from gspo_services.broker.quotas import PLACES, NoPlace

SILENT_S = PLACES["rollout"].silent_s


def opens(peers: Peers, name: str, role: Role, now: float, key: str = "") -> str | None:
    """Say Hello; the name of the peer that has to go for it."""
    sender, owner = SessionKey(name, "s"), Owner(key.encode(), key)
    gone = peers.make_room(sender, role, now, owner)
    peers.hello(sender, role, 0, now, owner)
    return None if gone is None else gone.key.peer


def crowd(peers: Peers, number: int, role: Role, now: float, key: str) -> None:
    for index in range(number):
        assert opens(peers, f"{key}-{index}", role, now, key) is None


def test_all_places_together_are_the_limit() -> None:
    assert sum(places.total for places in PLACES.values()) + 1 == MAX_PEERS


def test_rollouts_of_one_key_shut_out_no_other_key_no_learner_and_no_operator() -> None:
    peers = Peers(0.0)
    crowd(peers, MAX_ROLLOUTS_PER_KEY, "rollout", 0.0, "greedy")
    with pytest.raises(NoPlace, match="1024 of them with this key"):
        opens(peers, "greedy-more", "rollout", SILENT_S - 1, "greedy")
    assert opens(peers, "honest", "rollout", 0.0, "another") is None
    assert opens(peers, "learner", "learner", 0.0, "learner") is None
    assert opens(peers, "watcher", "operator", 0.0, "operator") is None


def test_the_session_of_the_same_key_that_was_silent_for_longest_makes_room() -> None:
    peers = Peers(0.0)
    crowd(peers, MAX_ROLLOUTS_PER_KEY, "rollout", 0.0, "greedy")
    opens(peers, "honest", "rollout", -100.0, "another")
    for index in (0, 1, 3):
        peer = peers.get(SessionKey(f"greedy-{index}", "s"))
        assert peer is not None
        peers.hear(peer, 5.0)
    assert opens(peers, "greedy-more", "rollout", SILENT_S, "greedy") == "greedy-2"
    assert peers.get(SessionKey("greedy-2", "s")) is None
    assert opens(peers, "greedy-2", "rollout", SILENT_S, "greedy") == "greedy-4", "it may come back"


def test_a_new_life_of_a_rollout_and_a_repeated_hello_need_no_place() -> None:
    peers = Peers(0.0)
    crowd(peers, MAX_ROLLOUTS_PER_KEY, "rollout", 0.0, "greedy")
    assert opens(peers, "greedy-7", "rollout", 1.0, "greedy") is None
    newer = SessionKey("greedy-7", "newer")
    assert peers.make_room(newer, "rollout", 1.0, Owner(b"greedy")) is None
    assert peers.hello(newer, "rollout", 0, 1.0, Owner(b"greedy")) == [SessionKey("greedy-7", "s")]
    peers.leave(newer)
    assert opens(peers, "greedy-more", "rollout", 2.0, "greedy") is None, "there is room again"


def test_when_all_places_are_taken_the_key_with_the_most_makes_room() -> None:
    peers = Peers(0.0)
    total = PLACES["rollout"].total
    for number, key in enumerate(("a", "b", "c", "d")):
        crowd(peers, min(MAX_ROLLOUTS_PER_KEY, total - number * MAX_ROLLOUTS_PER_KEY), "rollout", float(number), key)
    assert opens(peers, "honest", "rollout", 60.0, "e") in ("a-0", "b-0", "c-0")
    with pytest.raises(NoPlace):
        opens(peers, "another", "rollout", 1.0, "e")


def test_an_operator_always_gets_in() -> None:
    peers = Peers(0.0)
    crowd(peers, MAX_OPERATORS_PER_KEY, "operator", 1.0, "operator")
    assert opens(peers, "one more", "operator", 1.0, "operator") == "operator-0", "whom it costs one more Hello"
    for number in range(MAX_OPERATORS // MAX_OPERATORS_PER_KEY - 1):
        crowd(peers, MAX_OPERATORS_PER_KEY, "operator", 1.0, f"operator-{number}")
    assert opens(peers, "other", "operator", 1.0, "operator-alice") is not None


def test_without_keys_one_key_may_have_all_places() -> None:
    peers = Peers(0.0)
    crowd(peers, PLACES["rollout"].total, "rollout", 0.0, "")
    with pytest.raises(NoPlace):
        opens(peers, "one more", "rollout", 0.0)
    assert opens(peers, "one more", "rollout", SILENT_S) == "-0"
