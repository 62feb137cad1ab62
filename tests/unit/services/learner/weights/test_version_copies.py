"""What is copied for a version: all weights or the adapters, on the first rank or on another."""

from collections.abc import Iterator

import pytest
import torch

from gspo.model.serving_layout import ServedParameter
from gspo_services.learner.weights import AdapterCopy
from gspo_services.learner.weights.version_copies import VersionCopies
from gspo_services.shared.settings.sections import LoraSection, Model, Settings


class Engine:
    """Notes what it was asked for, and whether that was exhausted, as collectives need it."""

    def __init__(self, *, emits: bool) -> None:
        self.asked: list[str] = []
        self._emits = emits

    def _given(self, what: str, dtype: torch.dtype) -> Iterator[ServedParameter]:
        if self._emits:
            yield ServedParameter.alone(f"model.{what}.weight", torch.ones(2, dtype=dtype))
        self.asked.append(what)

    def served_parameters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        return self._given("merged", dtype)

    def base_parameters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        return self._given("base", dtype)

    def adapter_parameters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        return self._given("adapter", dtype)

    def probe(self) -> tuple[list[int], list[float]]:
        self.asked.append("probe")
        return [1, 2], [-0.5]


def settings(publish: str) -> Settings:
    return Settings(lora=LoraSection(rank=4, publish=publish), model=Model(dtype="bfloat16"))  # type: ignore[arg-type]


def test_merged_weights_are_copied_as_they_are_served() -> None:
    engine = Engine(emits=True)
    copied = VersionCopies(engine, settings("merged"), has_copies=True).copy()  # type: ignore[arg-type]
    assert copied is not None
    assert [(each.name, each.dtype) for each in copied.tensors] == [("model.merged.weight", "bfloat16")]
    assert engine.asked == ["merged"]


def test_the_model_below_adapters_is_copied_once() -> None:
    engine = Engine(emits=True)
    copies = VersionCopies(engine, settings("adapter"), has_copies=True)  # type: ignore[arg-type]
    first, second = copies.copy(), copies.copy()
    assert isinstance(first, AdapterCopy)
    assert isinstance(second, AdapterCopy)
    assert first.base is second.base
    assert [(each.name, each.dtype) for each in second.tensors] == [("model.adapter.weight", "bfloat16")]
    assert engine.asked == ["base", "probe", "adapter", "probe", "adapter"]


@pytest.mark.parametrize(("publish", "asked"), [("merged", ["merged"]), ("adapter", ["base", "probe", "adapter"])])
def test_other_ranks_take_part_in_the_same_collectives_and_get_nothing(publish: str, asked: list[str]) -> None:
    engine = Engine(emits=False)
    assert VersionCopies(engine, settings(publish), has_copies=False).copy() is None  # type: ignore[arg-type]
    assert engine.asked == asked
