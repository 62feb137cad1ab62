"""Question g: the paper's claims where its effects exist: routers that change their choice, long answers, long runs.

Fixed on 2026-11-22, before the first run; docs/evidence/study.md has the regime and the answers. The routers are held
undecided: while the start model imitates, they stay small and noisy, and in a run each update pulls them a tenth of the way
back. What would decide the paper's claims (an answer is open otherwise):

1. GRPO is unstable here or learns less than GSPO: shown if GRPO collapses in at least two seeds and GSPO in none, or if the
   interval of GRPO less GSPO lies below 0. Refuted if no GRPO run collapses and the mean of that difference is not below 0.
2. Routing Replay mends GRPO: shown if 1 is shown, GRPO with replay collapses in no seed, and its interval less GRPO lies
   above 0. Refuted if it collapses as often as GRPO and its mean is no better.
3. GSPO needs no replay: shown if GSPO collapses in no seed and its mean is not below that of GRPO with replay. Refuted if
   GSPO collapses in two seeds, or if the interval of GRPO with replay less GSPO lies above 0.
4. Clipped shares are two orders of magnitude apart: shown if GSPO's share is more than 30 times GRPO's in each seed, refuted
   if it is less than 10 times in each.

If fewer than 10 % of the experts change, averaged over GSPO's and GRPO's runs, the regime has missed its aim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from benchmarks.study.config import RunConfig

REGIME: Final = RunConfig(
    task="long-countdown",
    model="deep",
    seed=0,
    num_batches=200,
    num_sequences=64,
    eval_every=10,
    learning_rate=5e-5,
    anchor="proximal",
    noise="bf16",
    eps_low=3e-3,
    eps_high=4e-3,
    start_models=1000,
)
"""Six layers of 64 experts, answers of 100 to 160 tokens, an engine in bfloat16. As in the paper the learner computes the
denominator of the ratio itself, and nothing corrects the difference between learner and engine."""

GSPO: Final = "GSPO"
TOKEN_RATIO: Final[dict[str, Any]] = {"ratio_unit": "token", "eps_low": 0.2, "eps_high": 0.27}
ARMS: Final[dict[str, dict[str, Any]]] = {
    GSPO: {},
    "GRPO": TOKEN_RATIO,
    "GRPO + Routing Replay": {**TOKEN_RATIO, "routing_replay": True},
    "GSPO-token, per number": {"credit": "number"},
}
SEEDS: Final = (0, 1, 2)
COLUMN: Final = "200 batches"

REPLAY_OF_ENGINE: Final[dict[str, Any]] = {"routing_replay": True, "replay_from": "engine"}
ENGINE_ARMS: Final[dict[str, dict[str, Any]]] = {
    GSPO: {},
    "GSPO + R3": REPLAY_OF_ENGINE,
    "GRPO": TOKEN_RATIO,
    "GRPO + R2": {**TOKEN_RATIO, "routing_replay": True},
    "GRPO + R3": {**TOKEN_RATIO, **REPLAY_OF_ENGINE},
}
"""Question g-engine, fixed on 2026-11-27 before its first run: does it matter whose experts are replayed?

R2 replays those of the learner's pass at the batch's start, R3 those of the engine's own pass. At lag 0 the two differ by
the engine's bfloat16 alone. Runs of 100 batches on start models 10, 11 and 12. *R3 is ahead of R2*: shown if GRPO + R3 less
GRPO + R2 is above 0 in each seed, with Student's 95 % interval above 0; refuted if the mean is not above 0; open otherwise.
R3 less no replay, for each ratio, is described."""
ENGINE_SEEDS: Final = (10, 11, 12)
ENGINE_COLUMN: Final = "100 batches"


def comparison() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of every run; all arms of a seed before the next seed."""
    return _runs(ARMS, COLUMN, SEEDS, REGIME)


def engine_comparison() -> list[tuple[str, str, RunConfig]]:
    """Those of question g-engine."""
    return _runs(ENGINE_ARMS, ENGINE_COLUMN, ENGINE_SEEDS, replace(REGIME, num_batches=100))


def _runs(
    arms: Mapping[str, dict[str, Any]], column: str, seeds: tuple[int, ...], regime: RunConfig
) -> list[tuple[str, str, RunConfig]]:
    return [(arm, column, replace(regime, seed=seed, **values)) for seed in seeds for arm, values in arms.items()]
