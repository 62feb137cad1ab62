"""What a run optimises: ratio unit, clip range, anchor and mismatch handling, as one validated value.

Pure Python: a service can read and check an objective without importing torch. Annotations are evaluated, because the
checks read choices and ranges from them.
"""

import math
from dataclasses import Field, dataclass, fields
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

RatioUnit = Literal["sequence", "turn", "token"]
"""The set of action tokens that share one importance ratio: GSPO, turn-level, or GRPO."""

Anchor = Literal["behaviour", "proximal"]
"""The denominator of the ratio: the engine's log-probs, or the learner's own at the start of the batch."""

TisMode = Literal["truncate", "truncate_tokens", "truncate_product", "reject", "off"]

ClipCalibration = Literal["off", "widen"]

Aggregation = Literal["sequence", "token", "constant"]
"""What the sum over a sequence's tokens is divided by: see ``gspo.options.aggregation``."""

Baseline = Literal["mean", "leave_one_out"]
"""What a reward is compared with: the mean of its group, or the mean of the group's other members."""

StdOver = Literal["group", "batch"]
"""The rewards whose standard deviation divides the advantages."""

KlEstimator = Literal["k1", "k2", "k3"]
"""An estimator of the distance from a reference model: see ``gspo.options.penalties``."""

KlPlace = Literal["loss", "reward"]

GRPO_EPS = 0.2
"""The smallest eps that is refused for sequence ratios; it belongs to token ratios."""

SMALLEST_TOKEN_EPS = 0.01
"""A smaller eps is refused for token ratios: one token's engine noise alone is about as large (docs/gspo.md), and a mean
over many tokens, which needs 3e-4, belongs to sequence ratios."""


def require_number(name: str, value: float, *, low: float, high: float = math.inf, low_open: bool = False) -> None:
    """Raise ValueError unless ``value`` is finite and in [low, high), or in (low, high) with ``low_open``."""
    above = value > low if low_open else value >= low
    if not (math.isfinite(value) and above and value < high):
        raise ValueError(f"{name} is {value!r}; give a finite number in {'(' if low_open else '['}{low}, {high})")


@dataclass(frozen=True, kw_only=True)
class Range:
    """The finite numbers that a field may have: [low, high), or (low, high) with ``low_open``."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False

    def require(self, name: str, value: float) -> None:
        """Raises: ValueError when ``value`` is outside."""
        require_number(name, value, low=self.low, high=self.high, low_open=self.low_open)


_POSITIVE = Range(low=0.0, low_open=True)
_FRACTION = Range(low=0.0, high=1.0, low_open=True)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The GSPO-token objective of a run; ValueError names the field, its value and the way out.

    The defaults are the paper's clip (arXiv 2507.18071: 3e-4 below, 4e-4 above, on sequence ratios) against the engine's
    log-probs, widened for each lag by the drift and noise that are measured for it. No forward pass is added.
    docs/evidence/study.md says why. ``Objective(anchor="proximal")`` makes that pass, and weights the engine's mismatch.
    ``Objective.gspo()`` and ``Objective.grpo()`` are the papers' own; ``dataclasses.replace`` changes a field of either.
    """

    ratio_unit: RatioUnit = "sequence"
    """The tokens that share one importance ratio: a sequence (GSPO), a turn, or a token (GRPO). A token needs GRPO's eps_low
    and eps_high: the defaults are for whole sequences, and are refused."""

    eps_low: Annotated[float, _FRACTION] = 3e-4
    """A ratio below 1 - eps_low is clipped where the advantage is negative. The paper: 3e-4 (GRPO: 0.2)."""

    eps_high: Annotated[float, _POSITIVE] = 4e-4
    """A ratio above 1 + eps_high is clipped where the advantage is positive. The paper: 4e-4 (GRPO: 0.27)."""

    clip_range_growth: Annotated[float, Range()] = 0.0
    """c, for the behaviour anchor: the clip range of a sequence of lag d is g(d) times as wide, in log space. For c >= 0,
    g(d) = 1 + c * d (old sequences may have drifted further); for c < 0, g(d) = 1 / (1 + |c| * d) (old sequences are
    trusted less). 0 adds nothing: c is a guess, and clip_calibration measures instead."""

    noise_z: Annotated[float, Range(low=0.0)] = 1.0
    """z, for the behaviour anchor: how many measured deviations the clip range is wider on both sides. With clip_calibration
    the deviation is that of the sequence's lag and length; without it, sigma / sqrt(n) for n tokens, where sigma is the
    mismatch between engine and learner. 0 ignores both."""

    clip_calibration: ClipCalibration | None = None
    """For the behaviour anchor. widen: the clip range is wider by noise_z deviations of the drift and noise that are
    measured for each lag, at the start of every batch. off: by clip_range_growth and sigma. Not set: widen with the
    behaviour anchor, unless clip_range_growth is given; off with the proximal anchor."""

    clip_calibration_cap: Annotated[float, _POSITIVE] = 0.5
    """For clip_calibration = widen: for n tokens the clip range is wider by at most this over sqrt(n) on each side, in nats.
    A range that follows whatever drift it measures would be no brake. The default is 0.29 for 3 tokens, where the demo needs
    0.22, and 0.008 for 4,000. The metric clip_capped is the share of the tokens for which it holds."""

    anchor: Anchor = "behaviour"
    """The denominator of the ratio. behaviour: the engine's log-probs, as the paper proposes. proximal: the learner's own
    log-probs at the start of the batch, for one more forward pass; tis_mode then handles the engine's mismatch, and the
    clip sees only the batch's own updates. docs/evidence/study.md compares them."""

    tis_mode: TisMode | None = None
    """For the proximal anchor: importance sampling that corrects the engine's mismatch, truncated (TIS) or masked.
    truncate: weight sequences by exp(mean(log pi_prox - mu)), at most tis_cap. truncate_tokens: weight each token by its own
    pi_prox / mu, at most tis_token_cap. truncate_product: weight sequences by the product of these over their tokens, at
    most tis_product_cap. reject: mask sequences outside [1 / tis_cap, tis_cap], with weight 0. off: none of these. Not set:
    truncate. The behaviour anchor accepts only off, or not set, which then means off: the ratio already holds the mismatch,
    and a weight would count it twice."""

    tis_cap: Annotated[float, Range(low=1.0, low_open=True)] = 1.1
    """The largest weight of a sequence (and 1 / the least, with reject). It bounds the exponential of a mean per token, so
    it lies near 1 for long sequences: 1.1 is 0.1 nat per token. Answers of a few tokens need a larger one."""

    tis_token_cap: Annotated[float, Range(low=1.0, low_open=True)] = 2.0
    """For truncate_tokens: the largest factor of one token."""

    tis_product_cap: Annotated[float, Range(low=1.0, low_open=True)] = 2.0
    """For truncate_product: the largest factor of a sequence. It bounds a product over all tokens, which is exact, but whose
    scatter grows with the length: at 1,000 tokens, 2 is a mean of 7e-4 nat per token."""

    log_ratio_clamp: Annotated[float, _POSITIVE] = 10.0
    """Log-ratios beyond this are clamped (and counted): an unbounded ratio with a negative advantage diverges."""

    dual_clip: Annotated[float | None, Range(low=1.0, low_open=True)] = None
    """c: where the advantage is negative, a ratio above c counts as c, and its token gets no gradient (dual-clip PPO: 3).
    The clip itself bounds such a term on the other side only. Not set: only log_ratio_clamp bounds it."""

    adaptive_clip_target: Annotated[float | None, _FRACTION] = None
    """The clip fraction that AdaptiveClip steers to: after each batch the clip range is widened or narrowed, until this
    share of the sequences with an advantage is clipped (the paper: 0.15 of all). No run reaches a target above about 0.4,
    because half of them lie on the side where their sign is never clipped. The factor is the metric clip_scale; a restart
    keeps it. Not set: the width stays as the fields above give it."""

    aggregation: Aggregation = "sequence"
    """How the terms of tokens are averaged. sequence: over each sequence, then over sequences (GSPO, GRPO). token: over all
    action tokens of the optimizer step, so that a sequence weighs by its length (DAPO). constant: each sequence's sum is
    divided by aggregation_tokens, and then averaged over sequences (Dr. GRPO)."""

    aggregation_tokens: Annotated[int | None, Range(low=1)] = None
    """For aggregation = "constant", and needed there: the length that it divides by, such as the most tokens that the policy
    may sample for one answer. It must not change within a run: it is a factor of the learning rate."""

    kl_coefficient: Annotated[float, Range(low=0.0)] = 0.0
    """Weight of the distance from a reference model, KL(pi_theta || pi_ref) in nats. 0: none, and no reference is loaded.
    Otherwise each rank keeps a whole frozen copy of the start model, in learner.dtype, and makes one more forward pass.
    GRPO: 0.04."""

    kl_estimator: KlEstimator = "k3"
    """How a token's distance is estimated from d = log pi_ref - log pi_theta. k1: -d. k2: d^2 / 2, whose gradient is that of
    the KL. k3: e^d - 1 - d, which is never negative (GRPO). k1 is for kl_in = "reward" only."""

    kl_in: KlPlace = "loss"
    """Where the distance enters. loss: it is subtracted from the term of each token, with its gradient (GRPO). reward: its
    sum over the sequence is subtracted from the reward, before the advantages are made (RLOO)."""

    entropy_coefficient: Annotated[float, Range(low=0.0)] = 0.0
    """Weight of an entropy bonus: the entropy of each action token's distribution, in nats and over the whole vocabulary, is
    added to its term, with its gradient. 0: none."""

    @classmethod
    def gspo(cls, ratio_unit: Literal["sequence", "turn"] = "sequence") -> Self:
        """The GSPO paper's clip, whatever lag and engine noise (arXiv 2507.18071, section 5.1: 3e-4 / 4e-4).

        With unit "turn" every turn of a trajectory has the ratio that GSPO gives a sequence. The paper's values are for
        whole responses: the mean log-ratio of a turn of n tokens scatters like 1 / sqrt(n), so that short turns are
        clipped more. ``adaptive_clip_target`` finds the width that fits.
        """
        return cls(
            ratio_unit=ratio_unit,
            eps_low=3e-4,
            eps_high=4e-4,
            clip_calibration="off",
            noise_z=0.0,
            anchor="behaviour",
            tis_mode="off",
        )

    @classmethod
    def grpo(cls) -> Self:
        """GRPO (arXiv 2402.03300) with the clip that the GSPO paper tuned for it, 0.2 / 0.27, and without a KL term."""
        return cls(
            ratio_unit="token",
            eps_low=0.2,
            eps_high=0.27,
            clip_calibration="off",
            noise_z=0.0,
            anchor="behaviour",
            tis_mode="off",
        )

    def __post_init__(self) -> None:
        for field in fields(Objective):
            require_field(field, getattr(self, field.name))
        if self.ratio_unit == "sequence" and max(self.eps_low, self.eps_high) >= GRPO_EPS:
            raise ValueError(
                f"eps_low is {self.eps_low}, eps_high is {self.eps_high} with ratio_unit 'sequence': nothing would ever "
                "be clipped. The GSPO paper clips sequence ratios at 3e-4 / 4e-4; 0.2 / 0.27 are GRPO's values, for "
                "ratio_unit 'token'"
            )
        if self.ratio_unit == "token" and min(self.eps_low, self.eps_high) < SMALLEST_TOKEN_EPS:
            raise ValueError(
                f"eps_low is {self.eps_low}, eps_high is {self.eps_high} with ratio_unit 'token': nearly every token would "
                "be clipped, by noise. 3e-4 / 4e-4 are for sequence ratios, which are means. Set eps_low = 0.2 and "
                "eps_high = 0.27, as Objective.grpo() does (the GSPO paper's values for GRPO), or ratio_unit 'sequence'"
            )
        if self.clip_calibration == "widen" and self.anchor != "behaviour":
            raise ValueError(
                f"clip_calibration is {self.clip_calibration!r} with anchor 'proximal': that ratio holds neither drift nor "
                "noise, so there is nothing to widen. Set anchor = 'behaviour', or leave clip_calibration out"
            )
        if self.clip_calibration == "widen" and self.clip_range_growth != 0:
            raise ValueError(
                f"clip_calibration is {self.clip_calibration!r} and clip_range_growth is {self.clip_range_growth}: one "
                "measures the drift of a lag, the other guesses it. Leave one of them out"
            )
        if self.anchor == "behaviour" and self.tis_mode not in (None, "off"):
            raise ValueError(
                f"tis_mode is {self.tis_mode!r} with anchor 'behaviour': the ratio already holds the mismatch, "
                "and a weight would count it twice. Set tis_mode = 'off' or leave it out, or set anchor = 'proximal'"
            )
        _require_one_aggregation(self)
        _require_dual_clip_in_reach(self)
        _require_useful_kl(self)

    @property
    def is_calibrated(self) -> bool:
        """Whether the clip range is widened by what ``gspo.calibration`` measures: ``clip_calibration``, or what not setting
        it means."""
        if self.clip_calibration is not None:
            return self.clip_calibration == "widen"
        return self.anchor == "behaviour" and self.clip_range_growth == 0

    @property
    def weight_mode(self) -> TisMode:
        """The mode in effect: ``tis_mode``, or what not setting it means for this anchor."""
        if self.tis_mode is not None:
            return self.tis_mode
        return "truncate" if self.anchor == "proximal" else "off"

    @property
    def weight_cap(self) -> float:
        """The cap that belongs to ``weight_mode``."""
        caps = {"truncate_tokens": self.tis_token_cap, "truncate_product": self.tis_product_cap}
        return caps.get(self.weight_mode, self.tis_cap)

    @property
    def needs_proximal_logprobs(self) -> bool:
        """Whether each batch needs one forward pass more, under the weights at its start."""
        return self.anchor == "proximal"

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether the loss takes the log-probs of a reference model."""
        return self.kl_coefficient > 0 and self.kl_in == "loss"


def _require_one_aggregation(objective: Objective) -> None:
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


def _require_dual_clip_in_reach(objective: Objective) -> None:
    if objective.dual_clip is not None and math.log(objective.dual_clip) >= objective.log_ratio_clamp:
        raise ValueError(
            f"dual_clip is {objective.dual_clip} with log_ratio_clamp {objective.log_ratio_clamp}: ratios are clamped "
            f"before they reach it. Set log_ratio_clamp above {math.log(objective.dual_clip):.3g}, or leave dual_clip out"
        )


def _require_useful_kl(objective: Objective) -> None:
    if objective.kl_coefficient > 0 and objective.kl_in == "loss" and objective.kl_estimator == "k1":
        raise ValueError(
            "kl_estimator is 'k1' with kl_in 'loss': its gradient is 0 on average, whatever the reference model, so it "
            "would only add noise. Set kl_estimator = 'k2', which has the gradient of the KL, or 'k3', or kl_in = 'reward'"
        )


def require_field(field: Field[Any], value: Any) -> None:
    """Check one field of an objective by itself. Raises: ValueError naming the value and what is allowed."""
    kind, arguments = get_origin(field.type), get_args(field.type)
    if kind in (Union, UnionType):
        if value is None:
            return
        kind, arguments = get_origin(arguments[0]), get_args(arguments[0])
    if kind is Literal and value not in arguments:
        raise ValueError(f"{field.name} is {value!r}; choose one of {', '.join(arguments)}")
    if kind is Annotated and value is not None:
        allowed: Range = arguments[1]
        allowed.require(field.name, value)
