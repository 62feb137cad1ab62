"""A learner's engine without a model, which also publishes."""

from collections.abc import Iterator
from typing import Any

import torch

from gspo.model.serving_layout import ServedParameter
from gspo_protocol.messages import Probe
from gspo_protocol.messages.experts import ModelExperts
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.served_ranges import ServedRanges


class ServingBigram(BigramEngine):
    """A ``BigramEngine`` with what the learner's service needs besides. ``asked`` has what was taken of it to the end, as
    collectives need it: weights are on the first rank alone."""

    model_experts = ModelExperts(2, 2, 4)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[str] = []

    @property
    def vocabulary(self) -> int:
        return int(self.table.shape[0])

    def set_learning_rate(self, value: float) -> None:
        self._learning_rate = value

    def own_ranges(self, dtype: torch.dtype) -> ServedRanges:
        return ServedRanges(lambda: self.published(dtype), has_none=self.rank != 0)

    def published(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        yield ServedParameter.alone("table", self.table.detach().to(dtype))

    def base_parameters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        return self._given("base", dtype)

    def adapter_parameters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        return self._given("adapter", dtype)

    def version_probe(self, num_tokens: int) -> Probe | None:
        """Scripted engines have nothing to compare."""
        return None

    def probe(self) -> tuple[list[int], list[float]]:
        self.asked.append("probe")
        return [1, 2], [-0.5]

    def _given(self, name: str, dtype: torch.dtype) -> Iterator[ServedParameter]:
        if self.rank == 0:
            yield ServedParameter.alone(name, self.table.detach().to(dtype))
        self.asked.append(name)
