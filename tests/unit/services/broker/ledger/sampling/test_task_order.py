"""Order of tasks, and seeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.broker.ledger.sampling.task_order import TaskOrder, trajectory_seed


@given(seed=st.integers(0, 2**31 - 1), num_tasks=st.integers(1, 40), repetitions=st.integers(1, 3))
def test_every_repetition_is_a_permutation_and_the_same_in_every_process(
    seed: int, num_tasks: int, repetitions: int
) -> None:
    order = TaskOrder(seed, num_tasks)
    indices = [order.task_index(prompt) for prompt in range(repetitions * num_tasks)]
    for number in range(repetitions):
        assert sorted(indices[number * num_tasks : (number + 1) * num_tasks]) == list(range(num_tasks))
    assert [TaskOrder(seed, num_tasks).task_index(prompt) for prompt in range(len(indices))] == indices


def test_seeds_and_repetitions_have_different_orders() -> None:
    orders = [tuple(TaskOrder(seed, 30).task_index(prompt) for prompt in range(30)) for seed in (0, 1)]
    order = TaskOrder(0, 30)
    assert len({*orders, tuple(order.task_index(prompt) for prompt in range(30, 60))}) == 3


def test_an_endless_source_is_taken_in_order() -> None:
    assert [TaskOrder(5, None).task_index(prompt) for prompt in (0, 1, 77)] == [0, 1, 77]


def test_an_environment_without_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 training tasks"):
        TaskOrder(0, 0)


def test_trajectory_seeds_are_fixed_differ_and_fit_31_bits() -> None:
    seeds = [trajectory_seed(3, trajectory_id) for trajectory_id in range(2000)]
    assert seeds[:2] == [trajectory_seed(3, 0), trajectory_seed(3, 1)]
    assert len(set(seeds)) == 2000
    assert 2**30 < max(seeds) < 2**31
    assert trajectory_seed(4, 0) != seeds[0]
