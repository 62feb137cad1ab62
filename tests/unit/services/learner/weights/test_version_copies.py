"""What is copied for a version: all weights or the adapters, on the first rank or on another."""

import pytest

from gspo_services.learner.weights import AdapterCopy
from gspo_services.learner.weights.version_copies import VersionCopies
from gspo_services.shared.settings.sections import LoraSection, Model, Settings
from tests.support.learner.serving_bigram import ServingBigram


def settings(publish: str) -> Settings:
    return Settings(lora=LoraSection(rank=4, publish=publish), model=Model(dtype="bfloat16"))  # type: ignore[arg-type]


def test_merged_weights_are_copied_as_they_are_served() -> None:
    engine = ServingBigram()
    copied = VersionCopies(engine, settings("merged"), has_copies=True).copy()  # type: ignore[arg-type]
    assert copied is not None
    assert [(each.name, each.dtype) for each in copied.tensors()] == [("table", "bfloat16")]
    assert engine.asked == ["table"]


def test_the_model_below_adapters_is_copied_once() -> None:
    engine = ServingBigram()
    copies = VersionCopies(engine, settings("adapter"), has_copies=True)  # type: ignore[arg-type]
    first, second = copies.copy(), copies.copy()
    assert isinstance(first, AdapterCopy)
    assert isinstance(second, AdapterCopy)
    assert first.base is second.base
    assert [(each.name, each.dtype) for each in second.tensors()] == [("adapter", "bfloat16")]
    assert engine.asked == ["base", "probe", "adapter", "probe", "adapter"]


@pytest.mark.parametrize(("publish", "asked"), [("merged", ["table"]), ("adapter", ["base", "probe", "adapter"])])
def test_other_ranks_take_part_in_the_same_collectives_and_get_nothing(publish: str, asked: list[str]) -> None:
    engine = ServingBigram()
    engine.rank = 1
    assert VersionCopies(engine, settings(publish), has_copies=False).copy() is None  # type: ignore[arg-type]
    assert engine.asked == asked
