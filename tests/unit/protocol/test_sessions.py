"""Sessions are secrets, and their tags are what people see."""

from gspo_protocol.sessions import (
    belongs,
    connection_identity,
    first_identity,
    new_session,
    session_tag,
    session_towards,
    shown_identity,
)


def test_a_session_cannot_be_guessed() -> None:
    sessions = [new_session() for _ in range(1000)]
    assert len(set(sessions)) == 1000
    assert all(len(bytes.fromhex(session)) * 8 >= 128 for session in sessions)
    used = [bin(int(session, 16)).count("1") for session in sessions]
    assert 60 < sum(used) / 1000 < 68, "every bit is random: uuid4 has six that are not"


def test_each_other_end_gets_another_session() -> None:
    session = new_session()
    towards = {session_towards(session, f"tcp://{host}:1") for host in "abc"}
    assert len({session, *towards}) == 4
    assert session_towards(session, "tcp://a:1") in towards, "and always the same one"


def test_all_connections_of_a_session_belong_to_it() -> None:
    assert belongs(b"learner/abc", "learner", "abc")
    assert belongs(connection_identity("learner", "abc", 2).encode(), "learner", "abc")
    assert not belongs(b"learner/abcd", "learner", "abc")
    assert not belongs(b"learner/ab", "learner", "abc")


def test_a_shown_identity_has_a_tag_instead_of_the_session() -> None:
    session = new_session()
    identity = connection_identity("rollout-7", session).encode()
    assert shown_identity(identity) == f"rollout-7/{session_tag(session)}"
    again = connection_identity("rollout-7", session, 3).encode()
    assert shown_identity(again) == f"rollout-7/{session_tag(session)}#3"
    assert len(session_tag(session)) == 8
    assert session_tag(session) not in session
    assert shown_identity(b"a stranger") == "a stranger"
    assert shown_identity(b"\xff/\xff").startswith("\N{REPLACEMENT CHARACTER}/")


def test_all_connections_of_a_session_have_one_first_identity() -> None:
    first = connection_identity("rollout#0/a", "session").encode()
    for number in (0, 1, 2_000_000):
        assert first_identity(connection_identity("rollout#0/a", "session", number).encode()) == first
    assert first_identity(b"no session") == b"no session"
