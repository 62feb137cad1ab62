"""Offences are counted, forgiven over time, and shut their offender out when they are too many."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.limits import IGNORED_S, MAX_PEERS
from gspo_services.shared.net.penalties import Penalties

ONE, OTHER = ("work", b"one"), ("work", b"other")
GAPS = st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0, 3.0]), max_size=60)


def test_the_burst_is_free_and_the_next_offence_shuts_out_for_a_while() -> None:
    penalties = Penalties(burst=3, per_s=1.0)
    assert [penalties.offend(ONE, 5.0) for _ in range(4)] == [False, False, False, True]
    assert penalties.ignores(ONE, 5.0)
    assert penalties.ignores(ONE, 5.0 + IGNORED_S - 0.01)
    assert not penalties.ignores(OTHER, 5.0)
    assert not penalties.ignores(ONE, 5.0 + IGNORED_S)
    assert not penalties.active, "who was forgiven takes no memory"
    assert not penalties.offend(ONE, 5.0 + IGNORED_S), "it begins with nothing against it"


@given(gaps=GAPS, burst=st.integers(1, 5), per_s=st.sampled_from([0.5, 1.0, 2.0]))
def test_an_offender_is_shut_out_exactly_when_a_bucket_that_leaks_would_overflow(
    gaps: list[float], burst: int, per_s: float
) -> None:
    penalties = Penalties(burst=burst, per_s=per_s)
    now, times = 0.0, [0.0]
    for gap in [0.0, *gaps]:
        now += gap
        # The fullest of the intervals that end now: what came in it, less what leaked meanwhile.
        times.append(now)
        level = max(len(times) - 1 - first - (now - times[first + 1]) * per_s for first in range(len(times) - 1))
        shut_out = penalties.offend(ONE, now)
        assert shut_out == (level > burst + 1e-9) or abs(level - burst) < 1e-9
        if shut_out:
            assert penalties.ignores(ONE, now)
            return


@given(gaps=GAPS)
def test_who_offends_more_rarely_than_is_forgiven_is_never_shut_out(gaps: list[float]) -> None:
    penalties = Penalties(burst=1, per_s=2.0)
    for now in itertools.accumulate(0.5 + gap for gap in gaps):
        assert not penalties.offend(ONE, now)
        assert not penalties.ignores(ONE, now)


def test_a_longer_time_outside_is_not_made_shorter_by_another_offence() -> None:
    penalties = Penalties()
    penalties.shut_out(ONE, 0.0, 60.0)
    penalties.shut_out(ONE, 1.0, 10.0)
    assert penalties.ignores(ONE, 59.0)
    assert not penalties.ignores(ONE, 60.0)


def test_names_without_end_take_bounded_memory_and_the_newest_are_known() -> None:
    penalties = Penalties(burst=1, per_s=0.0)
    names = [("work", str(number)) for number in range(2 * MAX_PEERS)]
    for name in names:
        penalties.offend(name, 0.0)
        penalties.shut_out(name, 0.0, 60.0)
    assert len(penalties._offenders) == len(penalties._ignored) == MAX_PEERS
    assert all(penalties.ignores(name, 1.0) for name in names[-MAX_PEERS:])
    assert not any(penalties.ignores(name, 1.0) for name in names[:MAX_PEERS])


def test_who_offends_again_is_not_the_first_to_be_forgotten() -> None:
    penalties = Penalties(burst=2, per_s=0.0)
    penalties.offend(ONE, 0.0)
    for number in range(MAX_PEERS - 1):
        penalties.offend(("work", str(number)), 0.0)
    penalties.offend(ONE, 0.0)
    penalties.offend(OTHER, 0.0)  # Makes room by forgetting the oldest.
    assert penalties.offend(ONE, 0.0), "the third offence"
