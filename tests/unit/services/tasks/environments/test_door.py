"""The door of scores: whatever makes one, a score or a reason comes out."""

import asyncio
import errno
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.tasks.agents.results import scored
from gspo_services.tasks.environments import reason_of, score_of, through_the_door
from gspo_services.tasks.environments.reward_results import RewardResult, no_reward
from gspo_services.tasks.worker.failures import described, said
from gspo_services.tasks.worker.reward_value import UnscoredError, outcome_of
from tests.support.rewards.anything import ERRORS, made
from tests.support.rewards.recipes import recipes


async def making(recipe: Any) -> Any:
    return made(recipe)


async def raising(error: BaseException) -> RewardResult:
    raise error


@pytest.mark.parametrize("name", sorted(set(ERRORS) - {"GeneratorExit"}))
async def test_every_error_becomes_a_reason(name: str) -> None:
    result = await through_the_door(raising(ERRORS[name]()), no_reward)
    assert (result.reward, result.failure) == (None, "memory" if name == "MemoryError" else result.failure)
    assert result.failure in ("raised", "memory", "no such reason")
    assert result.detail.encode()
    assert len(result.detail) <= 2000


@given(recipes)
async def test_what_anything_returns_or_raises_is_a_reason_or_comes_out_as_it_is(recipe: Any) -> None:
    """Also errors whose own code raises when they are asked for their text, their class or their trace."""
    try:
        await through_the_door(making(recipe), no_reward)
    except GeneratorExit:
        assert recipe == {"raise": "GeneratorExit"}, "what closes a coroutine ends it"


@given(recipes)
def test_an_error_is_described_whatever_its_class_does(recipe: Any) -> None:
    try:
        made(recipe)
    except BaseException as error:  # noqa: BLE001
        for text in (described(error), said(error), reason_of(error)[1]):
            assert text.encode()
            assert len(text) <= 2000


@given(recipes)
def test_a_worker_tells_its_parent_a_reward_or_a_reason_whatever_the_values_own_code_does(recipe: Any) -> None:
    try:
        value = made(recipe)
    except BaseException:  # noqa: BLE001 - the caller's
        return
    try:
        told = outcome_of(value)
    except MemoryError:
        return
    assert set(told) in ({"reward"}, {"components"}, {"failure", "detail"})
    for number in (told.get("reward", 0.0), *told.get("components", {}).values()):
        assert type(number) is float
        assert abs(number) < float("inf")


weights = st.one_of(
    st.none(), st.dictionaries(st.sampled_from("abc"), st.one_of(st.floats(), st.decimals(), st.integers(), st.none()))
)


@given(st.one_of(st.floats(), st.dictionaries(st.sampled_from("abc"), st.floats())), weights)
def test_an_agents_result_is_one_that_a_broker_takes_or_a_reason(value: Any, weights: Any) -> None:
    result = scored(value, weights)
    if result.reward is None:
        assert result.failure in ("not_finite", "missing_component", "raised")
    else:
        assert abs(result.reward) <= 1e6
        assert all(abs(part) <= 1e6 for part in result.components.values())


@pytest.mark.parametrize(
    ("value", "weights", "reason"),
    [
        ({"a": 1e308, "b": 1e308}, None, "not_finite"),
        ({"a": 1e308}, {"a": Decimal(2)}, "not_finite"),
        ({"a": 1e308}, {"a": 1e308}, "not_finite"),
        ({"a": 1.0}, {"a": Decimal("sNaN")}, "not_finite"),
        ({"a": 1.0}, {"b": 1.0}, "missing_component"),
    ],
)
def test_arithmetic_on_components_stays_inside(value: Any, weights: Any, reason: str) -> None:
    with pytest.raises(UnscoredError) as refused:
        score_of(value, weights)
    assert refused.value.reason == reason


def test_weights_are_numbers_of_any_type() -> None:
    assert score_of({"a": 0.5, "b": 1.0}, {"a": Decimal(2)}).reward == 1.0


async def test_an_end_that_somebody_asked_for_is_none_of_the_scores_doing() -> None:
    begun = asyncio.Event()

    async def slow() -> RewardResult:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(through_the_door(slow(), no_reward))
        await begun.wait()
        task.cancel()
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await through_the_door(slow(), no_reward)


@pytest.mark.parametrize("error", [ConfigurationError("all"), ServiceError("all"), OSError(errno.ENOSPC, "full")])
async def test_what_concerns_the_whole_process_is_not_held_against_a_score(error: Exception) -> None:
    with pytest.raises(type(error)):
        await through_the_door(raising(error), no_reward)
    with pytest.raises(KeyError):
        await through_the_door(raising(KeyError()), no_reward, (KeyError,))
