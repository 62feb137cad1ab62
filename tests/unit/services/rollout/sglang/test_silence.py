"""An engine that answers nothing is noticed, also when no request lives for as long as it may be silent."""

from gspo_services.rollout.sglang.http import Silence
from tests.support.clocks import VirtualClock


def test_silence_adds_up_over_requests_that_are_given_up() -> None:
    clock = VirtualClock()
    silence = Silence(30.0, clock.now)
    for expected in (30.0, 20.0, 10.0, 7.5, 7.5):
        with silence.asking() as wait_s:
            assert wait_s == expected
            clock.advance(10.0)
        clock.advance(100.0)  # Nothing is asked.


def test_an_answer_ends_the_silence_of_all() -> None:
    clock = VirtualClock()
    silence = Silence(30.0, clock.now)
    with silence.asking():
        clock.advance(25.0)
        with silence.asking() as wait_s:
            assert wait_s == 7.5
        silence.broken()
        clock.advance(5.0)
        with silence.asking() as wait_s:
            assert wait_s == 25.0
