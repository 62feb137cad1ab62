"""Random small steps with everything that an option of the objective reads, and the library's loss of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from gspo.calibration import Calibration
from gspo.loss import LossOutput
from gspo.settings import Objective
from tests.support.loss.gspo_copies import GSPO, Gspo
from tests.support.loss.oracle import Measurement, OracleResult, OracleSequence, oracle_loss

F64 = torch.float64
EPISODES: Final = "episodes of several sequences"
PROXIMAL: Final = "proximal anchor"

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "turn ratios": {"ratio_unit": "turn"},
    "token ratios": {"ratio_unit": "token", "eps_low": 0.2, "eps_high": 0.27},
    "range by lag and sigma": {"clip_range_growth": -0.75, "noise_z": 0.5},
    "clamp": {"log_ratio_clamp": 1e-3},
    PROXIMAL: {"anchor": "proximal"},
    "reject": {"anchor": "proximal", "tis_mode": "reject", "tis_cap": 1.05},
    "token weights": {"anchor": "proximal", "tis_mode": "truncate_tokens", "tis_token_cap": 1.05},
    "icepop mask": {"anchor": "proximal", "tis_mode": "reject_tokens", "tis_token_cap": 1.05, "tis_token_floor": 0.95},
    "product weights": {"anchor": "proximal", "tis_mode": "truncate_product", "tis_product_cap": 1.2},
    "dual clip": {"dual_clip": 1.0005},
    "no mismatch weight": {"anchor": "proximal", "tis_mode": "off"},
    "token mean": {"aggregation": "token"},
    "constant length": {"aggregation": "constant", "aggregation_tokens": 9},
    EPISODES: {},
    "k2 in the loss": {"kl_coefficient": 0.3, "kl_estimator": "k2"},
    "entropy bonus": {"entropy_coefficient": 0.05},
    "k3 in the loss": {"kl_coefficient": 0.3, "kl_estimator": "k3"},
}
"""What an option changes in the default objective."""

RIVALS: Final[dict[str, dict[str, Any]]] = {
    "cispo": {"surrogate": "cispo", "ratio_unit": "token", "cispo_cap": 1.15},
    "sapo": {"surrogate": "sapo", "ratio_unit": "token", "sapo_tau_positive": 2.1, "sapo_tau_negative": 3.3},
    "dppo": {"surrogate": "dppo", "ratio_unit": "token", "dppo_bound": 0.03, "dppo_cap": 1.2},
    "m2po": {"surrogate": "m2po", "ratio_unit": "token", "m2po_bound": 0.02},
    "m2po_clip": {"surrogate": "m2po_clip", "ratio_unit": "token", "eps_low": 0.02, "eps_high": 0.02, "m2po_bound": 0.003},
    "vespo": {"surrogate": "vespo", "ratio_unit": "token"},
    "gmpo": {"surrogate": "gmpo", "ratio_unit": "token", "eps_low": 0.1, "eps_high": 0.1},
}
"""The surrogates beside the clip, with bounds that the random steps reach."""


def _fit(first: str, second: str) -> bool:
    """Whether both can be set at once: they do not give one field two values."""
    return not set(_ALL[first]) & set(_ALL[second])


_ALL: Final = OPTIONS | RIVALS


ALONE_AND_IN_PAIRS: Final = [
    (),
    *((name,) for name in OPTIONS),
    *(pair for pair in combinations(OPTIONS, 2) if _fit(*pair)),
]
RIVALS_WITH_OPTIONS: Final = [(rival, name) for rival in RIVALS for name in OPTIONS if _fit(rival, name)]


def objective_of(names: Sequence[str]) -> Objective:
    """The default objective with the options of these names."""
    changed: dict[str, Any] = {}
    for name in names:
        changed |= _ALL[name]
    return Objective(**changed)


@dataclass(frozen=True)
class Case:
    """A step: its sequences, and the numbers that the loss takes beside them."""

    sequences: list[OracleSequence]
    spare: int
    sigma: float
    clip_scale: float
    measured: Measurement

    @property
    def num_sequences(self) -> int:
        return len({s.episode for s in self.sequences}) + self.spare

    def oracle(self, objective: Objective) -> OracleResult:
        return oracle_loss(
            objective,
            self.sequences,
            spare=self.spare,
            sigma=self.sigma,
            clip_scale=self.clip_scale,
            measured=self.measured,
        )

    @property
    def calibration(self) -> Calibration:
        between_L, token_L = (torch.tensor(values, dtype=F64) for values in (self.measured.between, self.measured.token))
        return Calibration(torch.full_like(between_L, 7.0), between_L, token_L)


def random_case(choices: Random, objective: Objective, *, episodes: bool) -> Case:
    """A step of one to five sequences, some without action tokens. Log-ratios reach the bounds of ``objective``'s clip."""
    drawn = Random(choices.randrange(2**31))
    spread = 3 * objective.eps_high if objective.has_clip_range else 0.15
    sequences = []
    for index in range(choices.randint(1, 5)):
        length = choices.randint(1, 7)
        proximal = [-3 * drawn.random() for _ in range(length)]
        drift, away = drawn.gauss(0, spread), drawn.gauss(0, 0.06)
        shared = drawn.gauss(0, 1)
        anchor = proximal if objective.anchor == "proximal" else [p - away + drawn.gauss(0, 0.05) for p in proximal]
        sequences.append(
            OracleSequence(
                logprobs=[a + drift + drawn.gauss(0, spread) for a in anchor],
                proximal=proximal,
                behaviour=anchor if anchor is not proximal else [p - away + drawn.gauss(0, 0.05) for p in proximal],
                reference=[p + drawn.gauss(0, 0.3) for p in proximal],
                entropies=[2 * drawn.random() for _ in proximal],
                advantages=[shared + choices.choice([0.0, 0.0, 1.0]) * drawn.gauss(0, 1) for _ in proximal],
                mask=[choices.random() < 0.7 for _ in proximal],
                turns=[t // 2 for t in range(length)],
                lag=choices.choice([0.0, 1.0, 2.5]),
                episode=choices.randint(0, 2) if episodes else index,
            )
        )
    lags = choices.randint(1, 4)
    measured = Measurement(
        between=[drawn.choice([0.0, spread**2]) * drawn.random() for _ in range(lags)],
        token=[drawn.choice([0.0, spread**2]) * drawn.random() for _ in range(lags)],
    )
    return Case(sequences, choices.randint(0, 2), choices.choice([0.0, 1e-3]), choices.choice([1.0, 0.5]), measured)


@dataclass(frozen=True)
class FastResult:
    """The library's -J and its gradients, summed over micro-batches."""

    loss: float
    by_logprob: list[list[float]]
    by_entropy: list[list[float]]
    outputs: list[LossOutput]


def fast_loss(
    objective: Objective, case: Case, parts: Sequence[Sequence[int]], *, library: Gspo = GSPO, **changed: Any
) -> FastResult:
    """Run ``objective_loss`` on the micro-batches ``parts`` (indices of sequences) of the step."""
    num_tokens = sum(len(s.actions) for s in case.sequences)
    of_episode: dict[int, int] = {}
    for s in case.sequences:
        of_episode[s.episode] = of_episode.get(s.episode, 0) + len(s.actions)
    loss, outputs = 0.0, []
    gradients = {name: [[0.0] * len(s.mask) for s in case.sequences] for name in ("logprobs", "entropies")}
    for part in parts:
        sequences = [case.sequences[i] for i in part]
        whole = {s.episode for s in sequences}.isdisjoint(s.episode for i, s in enumerate(case.sequences) if i not in part)
        leaves = {name: _column(sequences, name).requires_grad_() for name in gradients}
        optional: dict[str, Any] = {
            "num_tokens": max(num_tokens, 1) if objective.aggregation == "token" else None,
            "entropy_T": leaves["entropies"],
            "episode_ids_S": torch.tensor([s.episode for s in sequences]),
        }
        if not whole:
            optional["tokens_per_sequence_S"] = torch.tensor([of_episode[s.episode] for s in sequences])
        if objective.needs_proximal_logprobs:
            optional["proximal_logprobs_T"] = _column(sequences, "proximal")
        if objective.needs_reference_logprobs:
            optional["reference_logprobs_T"] = _column(sequences, "reference")
        output = library.loss.objective_loss(
            objective,
            leaves["logprobs"],
            _column(sequences, "behaviour"),
            _column(sequences, "advantages"),
            torch.tensor([x for s in sequences for x in s.mask], dtype=torch.bool),
            torch.tensor([i for i, s in enumerate(sequences) for _ in s.mask]),
            torch.tensor([x for s in sequences for x in s.turns]),
            num_sequences=case.num_sequences,
            lag_S=torch.tensor([s.lag for s in sequences], dtype=F64),
            sigma=case.sigma,
            clip_scale=case.clip_scale,
            calibration=case.calibration if objective.is_calibrated else None,
            **{**optional, **changed},
        )
        loss += output.loss.item()
        outputs.append(output)
        output.loss.backward()
        for name, leaf in leaves.items():
            gradient_T = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for i, row in zip(part, gradient_T.split([len(s.mask) for s in sequences]), strict=True):
                gradients[name][i] = row.tolist()
    return FastResult(loss, gradients["logprobs"], gradients["entropies"], outputs)


def _column(sequences: Sequence[OracleSequence], name: str) -> Tensor:
    """NaN off the mask: nothing may be read there."""
    rows = [[x if m else float("nan") for x, m in zip(getattr(s, name), s.mask, strict=True)] for s in sequences]
    return torch.tensor([x for row in rows for x in row], dtype=F64)


def without_actions(case: Case) -> Case:
    """The same step with no action token at all."""
    return replace(case, sequences=[replace(s, mask=[False] * len(s.mask)) for s in case.sequences])
