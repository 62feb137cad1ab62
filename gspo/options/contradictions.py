"""What a ``gspo.settings.Objective`` cannot mean: pairs of fields that contradict each other. Pure Python."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Final

WITHOUT_RANGE: Final = frozenset({"cispo", "sapo", "dppo", "m2po", "vespo"})
"""The surrogates that have no clip range."""
OF_BEHAVIOUR: Final = frozenset({"dppo", "m2po", "m2po_clip", "vespo"})
"""The surrogates that look at the distance from the behaviour policy."""
_OF_M2PO: Final = ("m2po", "m2po_clip")
OF_THE_RANGE: Final = ("eps_low", "eps_high", "clip_range_growth", "noise_z", "clip_calibration", "adaptive_clip_target")
CAPS: Final = ("dual_clip", "cispo_cap", "dppo_cap")


def require_consistent(objective: Any) -> None:
    """Raises: ValueError naming both fields and the way out. objective: an ``Objective``, whose module imports this one."""
    _require_one_aggregation(objective)
    _require_useful_kl(objective)
    _require_the_surrogates_own(objective)
    _require_caps_in_reach(objective)
    if objective.tis_token_floor != 0.5 and objective.tis_mode != "reject_tokens":
        raise ValueError(
            f"tis_token_floor is {objective.tis_token_floor} with tis_mode {objective.tis_mode!r}, which has no such bound. "
            "Leave it out, or set tis_mode = 'reject_tokens'"
        )


def _require_the_surrogates_own(objective: Any) -> None:
    """What ``surrogate`` needs is there, and nothing is given that it would ignore."""
    surrogate, given = objective.surrogate, {}
    for field in fields(objective):
        if getattr(objective, field.name) != field.default:
            given[field.name] = getattr(objective, field.name)
    for name, value in given.items():
        owner = name.partition("_")[0]
        if owner in (*WITHOUT_RANGE, "gmpo") and owner != surrogate and not (owner == "m2po" and surrogate in _OF_M2PO):
            raise ValueError(
                f"{name} is {value!r} with surrogate {surrogate!r}, which ignores it: an objective has one surrogate. Leave "
                f"{name} out, or set surrogate = {owner!r}"
            )
    if surrogate == "clip":
        return
    if objective.ratio_unit != "token":
        raise ValueError(
            f"surrogate is {surrogate!r} with ratio_unit {objective.ratio_unit!r}: its source has a ratio for each token. "
            "Set ratio_unit = 'token', or surrogate = 'clip'"
        )
    ignored = ("dual_clip", *(OF_THE_RANGE if surrogate in WITHOUT_RANGE else ()))
    for name in ignored:
        if name in given and given[name] != "off":
            raise ValueError(
                f"{name} is {given[name]!r} with surrogate {surrogate!r}, which has no such bound and ignores it. "
                f"Leave {name} out, or set surrogate = 'clip'"
            )
    if surrogate in OF_BEHAVIOUR and objective.anchor == "proximal":
        raise ValueError(
            f"anchor is 'proximal' with surrogate {surrogate!r}, which goes by the distance from the behaviour policy. Set "
            "anchor = 'behaviour', or surrogate = 'clip'"
        )


def _require_caps_in_reach(objective: Any) -> None:
    for name in CAPS:
        cap = getattr(objective, name)
        if cap is not None and _is_used(objective, name) and math.log(cap) >= objective.log_ratio_clamp:
            raise ValueError(
                f"{name} is {cap} with log_ratio_clamp {objective.log_ratio_clamp}: ratios are clamped before they reach "
                f"it. Set log_ratio_clamp above {math.log(cap):.3g}, or leave {name} out"
            )


def _is_used(objective: Any, cap: str) -> bool:
    owner = "clip" if cap == "dual_clip" else cap.partition("_")[0]
    return bool(objective.surrogate == owner)


def _require_one_aggregation(objective: Any) -> None:
    if objective.aggregation == "constant" and objective.aggregation_tokens is None:
        raise ValueError(
            "aggregation is 'constant' and aggregation_tokens is not set; set it to the length that every sequence's sum is "
            "divided by, such as the most tokens of an answer"
        )
    if objective.aggregation != "constant" and objective.aggregation_tokens is not None:
        raise ValueError(
            f"aggregation_tokens is {objective.aggregation_tokens} with aggregation {objective.aggregation!r}: an objective "
            "has one aggregation, and only 'constant' divides by it. Leave it out, or set aggregation = 'constant'"
        )


def _require_useful_kl(objective: Any) -> None:
    if objective.kl_coefficient > 0 and objective.kl_in == "loss" and objective.kl_estimator == "k1":
        raise ValueError(
            "kl_estimator is 'k1' with kl_in 'loss': its gradient is 0 on average, whatever the reference model, so it "
            "would only add noise. Set kl_estimator = 'k2', which has the gradient of the KL, or 'k3', or kl_in = 'reward'"
        )
