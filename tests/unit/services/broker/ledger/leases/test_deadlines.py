"""Deadlines in order: what is past is found without a look at the others."""

from hypothesis import given
from hypothesis import strategies as st

from gspo_services.broker.ledger.leases.deadlines import Deadlines


@given(st.lists(st.tuples(st.sampled_from(["set", "remove", "postpone"]), st.integers(0, 5)), max_size=60))
def test_past_are_exactly_those_whose_time_has_come(steps: list[tuple[str, int]]) -> None:
    deadlines, expected = Deadlines(), dict[int, float]()
    for now, (step, trajectory_id) in enumerate(steps):
        if step == "set":
            deadlines.set(trajectory_id, now + 10.0)
            expected[trajectory_id] = now + 10.0
        elif step == "remove":
            deadlines.remove(trajectory_id)
            expected.pop(trajectory_id, None)
        else:
            deadlines.postpone(0.5)
            expected = {each: at + 0.5 for each, at in expected.items()}
        for time in (now, now + 5.0, now + 12.0):
            assert sorted(deadlines.past(time)) == sorted(each for each, at in expected.items() if at <= time)
    assert len(deadlines) == len(expected)
