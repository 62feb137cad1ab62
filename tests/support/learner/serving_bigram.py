"""A learner's engine without a model."""

from collections.abc import Iterator

import torch

from gspo.model.serving_layout import ServedParameter
from gspo_protocol.messages.experts import ModelExperts
from tests.support.engines.bigram_engine import BigramEngine


class ServingBigram(BigramEngine):
    """A ``BigramEngine`` with what the learner's service needs besides."""

    model_experts = ModelExperts(2, 2, 4)

    @property
    def vocabulary(self) -> int:
        return int(self.table.shape[0])

    def set_learning_rate(self, value: float) -> None:
        self._learning_rate = value

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return tensor.clone()

    def serving_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield "table", self.table.detach()

    def served_parameters(self, dtype: torch.dtype | None = None) -> Iterator[ServedParameter]:
        return (ServedParameter.alone(*each) for each in self.serving_weights(dtype))
