"""Ladders: every index is a task on one level."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.tasks.environments import Task
from gspo.tasks.ladders import STRIDE, Ladder, LadderTasks, Rung, Rungs

LADDERS = (Ladder(name="sums", last_level=2), Ladder(name="one"), Ladder(name="late", first_level=3, last_level=4))
RUNGS = [Rung(0, 0), Rung(0, 1), Rung(0, 2), Rung(1, 0), Rung(2, 3), Rung(2, 4)]


class Named(LadderTasks):
    def draw(self, ladder: int, level: int, index: int) -> Task:
        return {"ladder": self.ladders[ladder].name, "level": level, "index": index}


def test_the_first_tasks_show_every_ladder_then_the_next_level() -> None:
    rungs = Rungs(LADDERS)
    assert [rungs.rung(index) for index in range(7)] == [
        Rung(0, 0), Rung(1, 0), Rung(2, 3), Rung(0, 1), Rung(2, 4), Rung(0, 2), Rung(0, 0),
    ]  # fmt: skip


@given(rung=st.sampled_from(RUNGS), draw=st.integers(0, 10**9))
@settings(max_examples=300)
def test_an_index_is_on_its_rung(rung: Rung, draw: int) -> None:
    rungs = Rungs(LADDERS)
    index = rungs.task_index(rung, draw)
    assert rungs.rung(index) == rung
    assert index < 2**53, "tools that know only doubles show it as it is"


def test_no_two_draws_have_one_index() -> None:
    rungs = Rungs(LADDERS)
    indices = [rungs.task_index(rung, draw) for rung in RUNGS for draw in range(200)]
    assert len(set(indices)) == len(indices)


def test_the_tasks_of_ladders_have_no_end_and_know_their_level() -> None:
    tasks = Named(LADDERS)
    assert (tasks.num_tasks, tasks.digest) == (None, "")
    assert tasks.task(3) == {"ladder": "sums", "level": 1, "index": 3}
    assert tasks.task(10 * STRIDE + 4) == {"ladder": "late", "level": 4, "index": 10 * STRIDE + 4}
    with pytest.raises(IndexError, match="task -1 does not exist"):
        tasks.task(-1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"name": "two words"}, "'two words'"),
        ({"first_level": 3, "last_level": 2}, "its levels are 3 to 2"),
        ({"first_level": -1}, "its levels are -1 to 0"),
        ({"raise_at": 0.3, "lower_at": 0.3}, "lower_at is 0.3 and raise_at is 0.3"),
        ({"raise_at": 1.1}, "raise_at is 1.1"),
        ({"raise_at": float("nan")}, "raise_at is nan"),
        ({"weight": 0.0}, "weight is 0"),
        ({"weight": float("inf")}, "weight is inf"),
        ({"num_groups": 0}, "num_groups is 0"),
    ],
)
def test_a_ladder_without_meaning_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Ladder(**{"name": "sums", **values})


def test_ladders_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match='two ladders are called "one"'):
        Rungs([Ladder(name="one"), Ladder(name="one")])
    with pytest.raises(ValueError, match=f"have {STRIDE + 1} levels in all, {STRIDE} allowed"):
        Rungs([Ladder(name="high", last_level=STRIDE)])
