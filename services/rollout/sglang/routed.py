"""The experts that an engine reports for its tokens, and which of them are those that sampled the token. Pure."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from gspo.moe.mixture import mixture_of
from gspo_protocol.messages.experts import UNKNOWN, ModelExperts, encode_experts
from gspo_services.shared.weights import reported_experts

_WAY_OUT = 'serve the model of model.path, or set objective.routing_replay_from = "learner"'


class RoutedExperts(ModelExperts, frozen=True):
    """The shape of a model's choices, which an engine's answers must have."""

    dense_layers: tuple[int, ...] = ()
    """Layers without experts, of which SGLang reports something, too."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return that of a model's config.json. Raises: ServedError for one whose engine cannot report its choices."""
        found, dense = reported_experts(config), mixture_of(config).dense_layers
        return cls(found.num_layers, found.top_k, found.num_experts, dense_layers=tuple(sorted(dense)))

    def read(
        self,
        encoded: str | None,
        spans: Sequence[tuple[int, int, int]],
        valid_version: int | None,
        *,
        may_lack: bool = False,
    ) -> np.ndarray[Any, Any]:
        """Return the experts of an answer's tokens as messages hold them, uint8 [n, layers, k, bytes].

        Args:
            encoded: SGLang's ``routed_experts``: base64 of int32 [n, all layers, k]; None when it has none.
            spans: the versions of the tokens: (version, start, end), over all of them.
            valid_version: the only version whose tokens were sampled with these experts; None: all were. After a retracted
                update SGLang computes old tokens again, and reports the choices of the new weights for them.
            may_lack: SGLang reports none of a request that is aborted in its queue. Then none are known.

        Raises: ValueError for another number of values, none included, and for values that are no experts.
        """
        num_tokens = spans[-1][2] if spans else 0
        shape = (num_tokens, self.num_layers, self.top_k)
        reported = (num_tokens, self.num_layers + len(self.dense_layers), self.top_k)
        if encoded is None and (may_lack or not num_tokens):
            return encode_experts(np.full(shape, UNKNOWN, np.int32), self.num_experts)
        try:
            indices = np.frombuffer(base64.b64decode(encoded or "", validate=True), "<i4")
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"routed_experts is not base64 of int32 values: {error}") from error
        if indices.size != np.prod(reported):
            raise ValueError(
                f"routed_experts has {indices.size} values, {num_tokens} tokens x {reported[1]} layers x {self.top_k} "
                f"experts expected: {_WAY_OUT}"
            )
        indices = np.delete(indices.reshape(reported), self.dense_layers, axis=1)
        if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < self.num_experts):
            raise ValueError(
                f"routed_experts has experts {int(indices.min())} to {int(indices.max())}, the model has 0 to "
                f"{self.num_experts - 1}: {_WAY_OUT}"
            )
        for version, start, end in spans:
            if valid_version is not None and version != valid_version:
                indices[start:end] = UNKNOWN
        return encode_experts(indices, self.num_experts)
