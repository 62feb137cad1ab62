"""When a connection is asked for a sign of life, and when it is given up."""

from itertools import pairwise

from gspo_services.shared.net.liveness import ASK_S, GIVE_UP_MOST_S, GIVE_UP_S, SLOW_FOR_S, Liveness, Verdict

STEP_S = 0.25


class Watched:
    def __init__(self) -> None:
        self.now = 100.0
        self.liveness = Liveness(self.now)

    def wait(self, seconds: float) -> list[tuple[float, Verdict]]:
        """What was decided, and after how long."""
        begin, decided = self.now, []
        while self.now < begin + seconds:
            self.now += STEP_S
            verdict = self.liveness.look(self.now)
            if verdict != "fine":
                decided.append((self.now - begin, verdict))
        return decided


def test_silence_means_nothing_while_nothing_is_expected() -> None:
    watched = Watched()
    assert watched.wait(1000) == []
    watched.liveness.sent()
    watched.liveness.heard()
    assert watched.wait(1000) == []


def test_an_unanswered_message_leads_to_a_question_and_then_to_new_connections_ever_less_often() -> None:
    watched = Watched()
    watched.liveness.sent()
    decided = watched.wait(400)
    assert decided[:2] == [(ASK_S, "ask"), (GIVE_UP_S, "connect_again")]
    again = [at for at, verdict in decided if verdict == "connect_again"]
    gaps = [later - earlier for earlier, later in pairwise(again)]
    assert gaps[:4] == [8.0, 16.0, 32.0, 48.0]
    assert set(gaps[4:]) == {GIVE_UP_MOST_S}


def test_an_answer_ends_the_silence_and_the_caution() -> None:
    watched = Watched()
    watched.liveness.sent()
    watched.wait(GIVE_UP_S)
    watched.liveness.heard()
    watched.liveness.sent()
    assert watched.wait(GIVE_UP_S) == [(ASK_S, "ask"), (GIVE_UP_S, "connect_again")]


def answered_late(watched: Watched, delay_s: float) -> list[tuple[float, Verdict]]:
    """Send, and hear the answer after ``delay_s``. Returns what was decided meanwhile."""
    watched.liveness.sent()
    decided = watched.wait(delay_s)
    watched.liveness.heard()
    return decided


def test_an_end_that_answers_late_but_answers_keeps_its_connection() -> None:
    watched = Watched()
    # Over a new connection the answers to the former one are lost, so each would make a slow end slower.
    late = [answered_late(watched, delay_s) for delay_s in (3.0, 5.0, 9.0, 17.0, 23.0, 23.0)]
    assert [verdict for decided in late for _, verdict in decided] == ["ask"] * len(late)
    # Several answers may come at once: the later ones came early, and change nothing.
    watched.liveness.heard()
    assert {verdict for _, verdict in answered_late(watched, 45.0)} == {"ask"}


def test_patience_with_a_slow_end_ends_some_time_after_its_last_late_answer() -> None:
    watched = Watched()
    answered_late(watched, 3.0)
    answered_late(watched, 5.0)
    watched.wait(2 * SLOW_FOR_S)
    watched.liveness.sent()
    assert (GIVE_UP_S, "connect_again") in watched.wait(GIVE_UP_S)


def test_a_suspended_process_does_not_blame_the_other_end() -> None:
    watched = Watched()
    watched.liveness.sent()
    watched.now += 3600
    assert watched.liveness.look(watched.now) == "fine"
    watched.liveness.heard()
    assert watched.wait(10) == []
