"""The first batch of a run, before its first step: did engines sample it from the learner's policy?

A probe (gspo_protocol.probes) compares scores. What only sampling has (its temperature, a penalty, a bias, a peer that lies)
shows in the log-probs of sampled tokens alone: at lag 0 both sides had the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gspo.model.packing import PackedBatch
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

FAR: Final = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""Nats between both log-probs of a token, farther than rounding moves most of them; of the less precise side."""
FAR_ON_GPU: Final = 1e-2
"""Of float32, which a GPU's kernels may multiply as TF32."""
SHARE: Final = 0.1
"""Of the tokens. An expert that rounding chose moves a few."""
LEAST_TOKENS: Final = 50


class OtherPolicyError(ConfigurationError):
    """Engines sampled from another policy than the learner's."""


@dataclass(frozen=True, kw_only=True)
class FirstLook:
    """Looks at the tokens of the run's first batch."""

    far: float

    @classmethod
    def of(cls, settings: Settings, device: str) -> FirstLook:
        """``device``: the learner's."""
        dtypes = {settings.model.dtype, settings.learner.dtype} - {"float32"}
        if not dtypes and device != "cpu":
            return cls(far=FAR_ON_GPU)
        return cls(far=max(FAR[name] for name in dtypes or {"float32"}))

    def sums(self, packed: PackedBatch, logprobs_T: Tensor, policy_version: int) -> Tensor:
        """Return, as float64 [3], the lag-0 tokens, how many are far, and the sum of learner minus engine over those."""
        fresh_T = packed.mask_T & (packed.versions_T == policy_version)
        delta_T = torch.where(fresh_T, logprobs_T.detach() - packed.behaviour_T, 0).double()
        far_T = delta_T.abs() > self.far
        return torch.stack([fresh_T.double().sum(), far_T.double().sum(), torch.where(far_T, delta_T, 0).sum()])

    def require(self, sums: Tensor) -> None:
        """``sums``: of all ranks. Raises: OtherPolicyError, on all ranks alike."""
        tokens, far, total = sums.tolist()
        if tokens < LEAST_TOKENS or far <= SHARE * tokens:
            return
        side = "higher" if total > 0 else "lower"
        raise OtherPolicyError(
            f"engines sampled the first batch from another policy than the learner's: of {tokens:.0f} tokens sampled with "
            f"its weights {far:.0f} have log-probs more than {self.far:g} away from its own, which are {side} by "
            f"{abs(total) / far:.2g} in the mean; no step was made. Engines that agree about a probe differ in what only "
            "sampling has: a temperature, penalty, bias or logit processor of the server at rollout.server_url, or of what "
            "lies before it. What was sampled is in this run: begin again with another run.directory"
        )
