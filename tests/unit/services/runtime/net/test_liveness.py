"""When a connection is asked for a sign of life, and when it is given up."""

from itertools import pairwise

from services.runtime.net.liveness import ASK_S, GIVE_UP_MOST_S, GIVE_UP_S, Liveness, Verdict

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


def test_a_suspended_process_does_not_blame_the_other_end() -> None:
    watched = Watched()
    watched.liveness.sent()
    watched.now += 3600
    assert watched.liveness.look(watched.now) == "fine"
    watched.liveness.heard()
    assert watched.wait(10) == []
