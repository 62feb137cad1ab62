"""What a run optimises: ratio unit, clip, band growth, anchor and mismatch handling, as one validated value.

Pure Python: a service can read and check an objective without importing torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

RatioUnit = Literal["sequence", "turn", "token"]
"""The set of action tokens that share one importance ratio: GSPO, turn-level, or GRPO."""

Anchor = Literal["behaviour", "proximal"]
"""The denominator of the ratio: the engine's log-probs, or the learner's own at the start of the batch."""

MismatchMode = Literal["truncate", "reject", "off"]

GRPO_EPS = 0.2
"""The smallest eps that is refused for sequence ratios; it belongs to token ratios."""


def require_number(name: str, value: float, *, low: float, high: float = math.inf, low_open: bool = False) -> None:
    """Raise ValueError unless `value` is finite and in [low, high), or in (low, high) with `low_open`."""
    above = value > low if low_open else value >= low
    if not (math.isfinite(value) and above and value < high):
        raise ValueError(f"{name} is {value!r}; give a finite number in {'(' if low_open else '['}{low}, {high})")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The GSPO-token objective of a run; ValueError names the field, its value and the way out.

    The defaults are the paper's clip (arXiv 2507.18071: 3e-4 below, 4e-4 above, on sequence ratios) around the learner's
    own log-probs at the start of the batch, with a truncated weight for the engine's mismatch: of the objectives that
    docs/evidence/study.md compares, only this one clips stale sequences as it clips fresh ones. With `anchor="behaviour",
    mismatch_mode="off"` no forward pass is added, and the clip range is widened by one eps per version of lag and by one
    standard deviation of engine noise. `Objective.gspo()` and `Objective.grpo()` are the papers' own;
    `dataclasses.replace` changes a field of either.
    """

    ratio_unit: RatioUnit = "sequence"

    eps_low: float = 3e-4
    """A ratio below 1 - eps_low is clipped where the advantage is negative. In (0, 1)."""

    eps_high: float = 4e-4
    """A ratio above 1 + eps_high is clipped where the advantage is positive. Above 0."""

    clip_range_growth: float = 1.0
    """c: the band of a sequence of lag d is g(d) times as wide, in log space: g(d) = 1 + c * d for c >= 0 (old sequences
    may have drifted further), 1 / (1 + |c| * d) for c < 0 (old sequences are trusted less). 0 ignores lag."""

    noise_z: float = 1.0
    """z: the band of a unit of n tokens is z * sigma / sqrt(n) wider on both sides. 0 ignores engine noise."""

    anchor: Anchor = "proximal"

    mismatch_mode: MismatchMode = "truncate"
    """For the proximal anchor: weight sequences by exp(mean(log pi_prox - mu)), truncated at `mismatch_cap`;
    or give weight 0 to sequences outside [1 / cap, cap]; or do neither."""

    mismatch_cap: float = 1.1
    """C. It bounds the exponential of a *mean* per token, so that it lies near 1: 1.1 is 0.1 nat per token."""

    log_ratio_clamp: float = 10.0
    """Log-ratios beyond this are clamped (and counted): an unbounded ratio with a negative advantage diverges."""

    adaptive_clip_target: float | None = None
    """The clip fraction that `AdaptiveClip` steers the band's width to, in (0, 1). None leaves the width alone."""

    @classmethod
    def gspo(cls, ratio_unit: Literal["sequence", "turn"] = "sequence") -> Objective:
        """The GSPO paper's clip, whatever lag and engine noise (arXiv 2507.18071, section 5.1: 3e-4 / 4e-4).

        With unit "turn" every turn of a trajectory has the ratio that GSPO gives a sequence. The paper's values are for
        whole responses: the mean log-ratio of a turn of n tokens scatters like 1 / sqrt(n), so that short turns are
        clipped more. `adaptive_clip_target` finds the width that fits.
        """
        return cls(
            ratio_unit=ratio_unit,
            eps_low=3e-4,
            eps_high=4e-4,
            clip_range_growth=0.0,
            noise_z=0.0,
            anchor="behaviour",
            mismatch_mode="off",
        )

    @classmethod
    def grpo(cls) -> Objective:
        """GRPO (arXiv 2402.03300) with the clip that the GSPO paper tuned for it, 0.2 / 0.27, and without a KL term."""
        return cls(
            ratio_unit="token",
            eps_low=0.2,
            eps_high=0.27,
            clip_range_growth=0.0,
            noise_z=0.0,
            anchor="behaviour",
            mismatch_mode="off",
        )

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("ratio_unit", self.ratio_unit, get_args(RatioUnit)),
            ("anchor", self.anchor, get_args(Anchor)),
            ("mismatch_mode", self.mismatch_mode, get_args(MismatchMode)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        require_number("eps_low", self.eps_low, low=0.0, high=1.0, low_open=True)
        require_number("eps_high", self.eps_high, low=0.0, low_open=True)
        require_number("clip_range_growth", self.clip_range_growth, low=-math.inf)
        require_number("noise_z", self.noise_z, low=0.0)
        require_number("mismatch_cap", self.mismatch_cap, low=1.0, low_open=True)
        require_number("log_ratio_clamp", self.log_ratio_clamp, low=0.0, low_open=True)
        if self.adaptive_clip_target is not None:
            require_number("adaptive_clip_target", self.adaptive_clip_target, low=0.0, high=1.0, low_open=True)
        if self.ratio_unit == "sequence" and max(self.eps_low, self.eps_high) >= GRPO_EPS:
            raise ValueError(
                f"eps_low is {self.eps_low}, eps_high is {self.eps_high} with ratio_unit 'sequence': nothing would ever "
                "be clipped. The GSPO paper clips sequence ratios at 3e-4 / 4e-4; 0.2 / 0.27 are GRPO's values, for "
                "ratio_unit 'token'"
            )
        if self.anchor == "behaviour" and self.mismatch_mode != "off":
            raise ValueError(
                f"mismatch_mode is {self.mismatch_mode!r} with anchor 'behaviour': the ratio already contains the "
                "engine-versus-learner mismatch and would count it twice. Use mismatch_mode 'off' or anchor 'proximal'"
            )

    @property
    def needs_proximal_logprobs(self) -> bool:
        """Whether each batch needs one forward pass more, under the weights at its start."""
        return self.anchor == "proximal"
