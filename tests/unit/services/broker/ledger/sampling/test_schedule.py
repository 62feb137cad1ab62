"""Which task comes next: shares of the sources, tasks that are added, and the same draws after a restart."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.broker.ledger.sampling import AddedTasks, SourceShare, TaskSchedule
from gspo_services.broker.ledger.sampling.task_order import TaskOrder
from gspo_services.broker.rows import AdditionRow


def shares(*sources: tuple[float, int]) -> list[SourceShare]:
    return [SourceShare(name=f"s{place}", weight=weight, num_tasks=number) for place, (weight, number) in enumerate(sources)]


def addition(number: int, first_task: int, num_tasks: int, at_draw: int, source: str = "s0") -> AdditionRow:
    return AdditionRow(
        number=number, source=source, name="x", digest="d", first_task=first_task, num_tasks=num_tasks, at_draw=at_draw
    )


def added(source: str) -> AddedTasks:
    return AddedTasks(source=source, name="x", digest="d", first_task=9, num_tasks=4)


def draws(schedule: TaskSchedule, number: int) -> list[int]:
    return [schedule.task_index(draw) for draw in range(number)]


@given(seed=st.integers(0, 2**31 - 1), num_tasks=st.integers(1, 30))
def test_one_source_comes_in_the_order_of_tasks(seed: int, num_tasks: int) -> None:
    order = TaskOrder(seed, num_tasks)
    assert draws(TaskSchedule(seed, shares((2.5, num_tasks))), 70) == [order.task_index(prompt) for prompt in range(70)]


def test_tasks_without_end_are_taken_in_order() -> None:
    assert draws(TaskSchedule(3, ()), 5) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="tasks without end, and nothing to add to"):
        TaskSchedule(3, ()).add(added("s0"), 0)


@given(weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=5), number=st.integers(1, 300))
def test_each_source_has_its_share_of_any_beginning(weights: list[float], number: int) -> None:
    sources = shares(*((weight, 7) for weight in weights))
    counts = Counter(index // 7 for index in draws(TaskSchedule(0, sources), number))
    for place, weight in enumerate(weights):
        assert abs(counts[place] - number * weight / sum(weights)) <= len(weights) - 1


def test_a_source_is_used_up_before_it_begins_again() -> None:
    indices = draws(TaskSchedule(1, shares((1, 4), (3, 6))), 80)
    for first, size in ((0, 4), (4, 6)):
        own = [index for index in indices if first <= index < first + size]
        for begin in range(0, len(own) - size + 1, size):
            assert sorted(own[begin : begin + size]) == list(range(first, first + size))


@given(at_draw=st.integers(0, 40), later=st.integers(0, 20), seed=st.integers(0, 1000))
def test_added_tasks_change_no_draw_before_them_and_are_all_in_the_pass(at_draw: int, later: int, seed: int) -> None:
    plain = draws(TaskSchedule(seed, shares((1, 10))), at_draw + 60)
    rows = [addition(1, 10, 5, at_draw), addition(2, 15, 3, at_draw + later)]
    schedule = TaskSchedule(seed, shares((1, 10)), rows)
    found = draws(schedule, at_draw + 60)
    assert found[:at_draw] == plain[:at_draw]
    assert set(found[at_draw:]) == set(range(18))
    assert max(found[: at_draw + later], default=0) < 15
    assert schedule.num_tasks == 18
    left = -at_draw % 10
    if left and later > left + 5:
        assert set(range(10, 15)) <= set(found[at_draw : at_draw + left + 5]), "before the next pass"


@given(order=st.permutations(range(30)))
def test_draws_are_the_same_in_any_order_and_after_a_restart(order: list[int]) -> None:
    rows = [addition(1, 9, 4, 11, "s1")]
    schedule = TaskSchedule(4, shares((1, 5), (2, 4)), rows)
    expected = draws(TaskSchedule(4, shares((1, 5), (2, 4)), rows), 30)
    assert [schedule.task_index(draw) for draw in order] == [expected[draw] for draw in order]


def test_tasks_that_are_added_while_it_is_used_come_as_after_a_restart() -> None:
    live = TaskSchedule(4, shares((1, 5), (2, 4)))
    before = draws(live, 11)
    assert live.add(added("s1"), 11) == addition(1, 9, 4, 11, "s1")
    assert before + [live.task_index(draw) for draw in range(11, 40)] == draws(
        TaskSchedule(4, shares((1, 5), (2, 4)), [addition(1, 9, 4, 11, "s1")]), 40
    )
    with pytest.raises(ValueError, match='there is no source "s7": the run has s0, s1'):
        live.add(added("s7"), 40)


def test_an_environment_without_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 training tasks"):
        TaskSchedule(0, shares((1, 0)))
