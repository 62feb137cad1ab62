"""Question h: do the rivals of the clip learn faster, or stay stable longer, than the clip, where lags are large?

The regime and the rates are those of question f. Nothing is recorded yet: ``make study`` leaves these runs out, and
``python -m benchmarks.study --only h`` makes them. An arm's rate is chosen from them, before it is judged on other seeds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from benchmarks.study.config import RunConfig
from benchmarks.study.questions.settled import ARMS as OF_THE_CLIP
from benchmarks.study.questions.settled import CALIBRATED, RATES, REGIME, TUNING_SEEDS
from gspo.settings import Objective

GRPO: Final[dict[str, Any]] = {"ratio_unit": "token", "eps_low": 0.2, "eps_high": 0.27}
GMPO: Final = Objective.gmpo()


def _without_range(surrogate: str, **more: Any) -> dict[str, Any]:
    return {"surrogate": surrogate, "ratio_unit": "token", "clip": "none", **more}


ARMS: Final[dict[str, dict[str, Any]]] = {
    "fixed": OF_THE_CLIP["fixed"],
    CALIBRATED: OF_THE_CLIP[CALIBRATED],
    "GRPO": GRPO,
    # Over all tokens of a step, as their authors train them; DPPO's constant length differs from it by a factor alone.
    "CISPO": _without_range("cispo", aggregation="length"),
    "SAPO": _without_range("sapo"),
    "DPPO": _without_range("dppo", aggregation="length"),
    "M2PO": _without_range("m2po", aggregation="length"),
    "GMPO": {"surrogate": "gmpo", "ratio_unit": "token", "eps_low": GMPO.eps_low, "eps_high": GMPO.eps_high},
    "IcePop": {**GRPO, "anchor": "proximal", "mismatch_mode": "reject_tokens", "mismatch_cap": 5.0},
    "LUSPO": {"aggregation": "sum", "eps_low": 2e-3, "eps_high": 2.5e-3},
    "VCPO": {"clip": "none", "rate_by_ess": True},
}


def comparison() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration: every arm at every rate."""
    return [
        (arm, f"lr {rate:g}", replace(REGIME, seed=seed, start_models=1000, learning_rate=rate, **fields))
        for seed in TUNING_SEEDS
        for rate in RATES
        for arm, fields in ARMS.items()
    ]
