"""Order of tasks, seeds, and the versions that a chunk names for its tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Chunk, Segment, VersionRun
from services.broker.ledger.task_order import TaskOrder, trajectory_seed
from services.broker.ledger.token_versions import action_tokens


@given(seed=st.integers(0, 2**31 - 1), num_tasks=st.integers(1, 40), epochs=st.integers(1, 3))
def test_every_repetition_is_a_permutation_and_the_same_in_every_process(seed: int, num_tasks: int, epochs: int) -> None:
    order = TaskOrder(seed, num_tasks)
    indices = [order.task_index(prompt) for prompt in range(epochs * num_tasks)]
    for epoch in range(epochs):
        assert sorted(indices[epoch * num_tasks : (epoch + 1) * num_tasks]) == list(range(num_tasks))
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


segments = st.lists(
    st.tuples(st.sampled_from(["action", "observation"]), st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=6
)


@given(parts=segments, data=st.data())
def test_action_tokens_agrees_with_counting_token_by_token(parts: list[tuple[str, int, int]], data: st.DataObject) -> None:
    kinds = [kind for kind, _, num in parts for _ in range(num)]
    versions = [data.draw(st.integers(1, 9)) if kind == "action" else -1 for kind in kinds]
    chunk = Chunk(
        trajectory_id=0,
        epoch=1,
        offset=0,
        num_tokens=len(kinds),
        segments=[Segment(kind, turn, num) for kind, turn, num in parts],  # type: ignore[arg-type]
        version_runs=[VersionRun(version, 1) for version in versions],
    )
    found = action_tokens(chunk, newest_version=9)
    actions = [version for version in versions if version != -1]
    assert (found.num, found.version_sum) == (len(actions), sum(actions))
    assert (found.oldest, found.last) == ((min(actions), actions[-1]) if actions else (0, 0))
    assert found.num_turns == max((turn + 1 for kind, turn, _ in parts if kind == "action"), default=0)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((-1, -1), "version -1 to action tokens: published are 1 to 4"),
        ((-1, 5), "version 5 to action tokens"),
        ((-1, 0), "version 0 to action tokens"),
        ((2, 2), "version 2 to observation tokens: it must be -1"),
    ],
)
def test_impossible_versions_are_named(versions: tuple[int, int], reason: str) -> None:
    chunk = Chunk(
        trajectory_id=0,
        epoch=1,
        offset=0,
        num_tokens=4,
        segments=[Segment("observation", 0, 2), Segment("action", 0, 2)],
        version_runs=[VersionRun(version, 2) for version in versions],
    )
    with pytest.raises(ValueError, match=reason):
        action_tokens(chunk, newest_version=4)
