"""What a reward is, of every type that user code returns."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.limits import MAX_COMPONENTS as MOST_ON_THE_WIRE
from gspo_protocol.messages.base import ComponentName
from gspo_services.tasks.worker.reward_value import COMPONENT_NAME, MAX_COMPONENTS, UnscoredError, outcome_of, value_of
from tests.support.rewards.values import COMPONENTS, GOOD, SIXTEEN, WRONG, WRONG_COMPONENTS, Hostile

TENSORS = {
    "float": (torch.tensor(1.5), 1.5),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "bool": (torch.tensor([1, 2]).sum() == 3, 1.0),
    "int": (torch.tensor(3), 3.0),
}
WRONG_TENSORS = {
    "shape (1,)": (torch.tensor([1.0]), "shape (1,)"),
    "shape (2, 2)": (torch.ones(2, 2), "shape (2, 2)"),
    "complex": (torch.tensor(1 + 0j), "(Tensor)"),
    "nan": (torch.tensor(float("nan")), "tensor(nan) (Tensor)"),
    "no memory behind it": (torch.tensor(1.0, device="meta"), "RuntimeError"),
}


@pytest.mark.parametrize(
    ("value", "reward"), [*GOOD.values(), *TENSORS.values()], ids=[*GOOD, *map("tensor {}".format, TENSORS)]
)
def test_every_finite_number_is_a_reward(value: Any, reward: float) -> None:
    found = value_of(value)
    assert (found, type(found)) == (reward, float)


@pytest.mark.parametrize(("value", "reason", "words"), WRONG.values(), ids=WRONG)
def test_what_is_not_a_finite_number_is_refused_with_its_type(value: Any, reason: str, words: str) -> None:
    with pytest.raises(UnscoredError) as refused:
        value_of(value)
    assert (refused.value.reason, words in str(refused.value)) == (reason, True), refused.value
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(("value", "words"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_a_tensor_that_is_not_one_real_number_is_refused(value: Any, words: str) -> None:
    with pytest.raises(UnscoredError) as refused:
        value_of(value)
    assert words in str(refused.value)


@pytest.mark.parametrize("value", COMPONENTS.values(), ids=COMPONENTS)
def test_components_of_any_mapping_become_plain_floats(value: Any) -> None:
    found = value_of(value)
    assert found == {"a": 1.0, "b-2.c_": 0.25}
    assert isinstance(found, dict)
    assert {(type(name), type(part)) for name, part in found.items()} == {(str, float)}


@pytest.mark.parametrize(("value", "reason", "words"), WRONG_COMPONENTS.values(), ids=WRONG_COMPONENTS)
def test_a_component_with_a_bad_name_or_value_is_refused(value: Any, reason: str, words: str) -> None:
    with pytest.raises(UnscoredError) as refused:
        value_of(value)
    assert (refused.value.reason, words in str(refused.value)) == (reason, True), refused.value


def test_as_many_components_as_the_wire_takes_are_a_reward() -> None:
    assert (value_of(SIXTEEN), MAX_COMPONENTS) == (SIXTEEN, MOST_ON_THE_WIRE)


def test_a_component_has_the_names_that_the_wire_takes() -> None:
    (meta,) = ComponentName.__metadata__  # type: ignore[attr-defined]
    assert meta.pattern == f"^{COMPONENT_NAME.pattern}$"


def test_a_lack_of_memory_is_not_about_the_value() -> None:
    with pytest.raises(MemoryError):
        value_of(Hostile(MemoryError()))


numbers = st.one_of(st.floats(), st.integers(), st.decimals(), st.fractions(), st.complex_numbers())
returned = st.one_of(numbers, st.none(), st.text(), st.binary(), st.lists(numbers), st.dictionaries(st.text(), numbers))


@given(returned)
def test_a_worker_tells_its_parent_a_reward_or_a_reason_whatever_was_returned(value: Any) -> None:
    told = outcome_of(value)
    assert set(told) in ({"reward"}, {"components"}, {"failure", "detail"})
    if "detail" in told:
        assert told["detail"].encode("utf-8")
        assert len(told["detail"]) < 600
