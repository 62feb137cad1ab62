"""What a run optimises: ratio unit, clip range, anchor and mismatch handling, as one validated value.

Pure Python: a service can read and check an objective without importing torch. Annotations are evaluated, because the
checks read choices and ranges from them.
"""

import math
from dataclasses import Field, dataclass, fields, replace
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from gspo.options.contradictions import WITHOUT_RANGE, require_consistent

RatioUnit = Literal["sequence", "turn", "token"]
"""The set of action tokens that share one importance ratio: GSPO, turn-level, or GRPO."""

Anchor = Literal["behaviour", "proximal"]
"""The denominator of the ratio: the engine's log-probs, or the learner's own at the start of the batch."""

Surrogate = Literal["clip", "cispo", "sapo", "dppo", "m2po", "m2po_clip", "vespo", "gmpo"]
"""What each token adds to J: see ``gspo.options.surrogates``."""

TisMode = Literal["truncate", "truncate_tokens", "truncate_product", "reject", "reject_tokens", "off"]
"""What corrects the engine's mismatch, for the proximal anchor: see ``mismatch_weights``."""

ClipCalibration = Literal["off", "widen"]
"""Whether the clip range follows what is measured for each lag: see ``calibrated_clip_range``."""

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
    pi_prox / mu, at most tis_token_cap. reject_tokens: the same, and 0 outside [tis_token_floor, tis_token_cap] (IcePop).
    truncate_product: weight sequences by the product of these over their tokens, at most tis_product_cap. reject: mask
    sequences outside [1 / tis_cap, tis_cap], with weight 0. off: none of these. Not set:
    truncate. The behaviour anchor accepts only off, or not set, which then means off: the ratio already holds the mismatch,
    and a weight would count it twice."""

    tis_cap: Annotated[float, Range(low=1.0, low_open=True)] = 1.1
    """The largest weight of a sequence (and 1 / the least, with reject). It bounds the exponential of a mean per token, so
    it lies near 1 for long sequences: 1.1 is 0.1 nat per token. Answers of a few tokens need a larger one."""

    tis_token_cap: Annotated[float, Range(low=1.0, low_open=True)] = 2.0
    """For truncate_tokens and reject_tokens: the largest factor of one token."""

    tis_product_cap: Annotated[float, Range(low=1.0, low_open=True)] = 2.0
    """For truncate_product: the largest factor of a sequence. It bounds a product over all tokens, which is exact, but whose
    scatter grows with the length: at 1,000 tokens, 2 is a mean of 7e-4 nat per token."""

    tis_token_floor: Annotated[float, _FRACTION] = 0.5
    """For reject_tokens: a token with a smaller pi_prox / mu is masked. IcePop: 0.5, and 5 for tis_token_cap."""

    log_ratio_clamp: Annotated[float, Range(low=0.0, high=64.0, low_open=True)] = 10.0
    """Log-ratios beyond this are clamped (and counted): an unbounded ratio with a negative advantage diverges. From 64 on a
    ratio times an advantage may be infinite in float32."""

    dual_clip: Annotated[float | None, Range(low=1.0, low_open=True)] = None
    """c: where the advantage is negative, a ratio above c counts as c, and its token gets no gradient (dual-clip PPO: 3).
    The clip itself bounds such a term on the other side only. Not set: only log_ratio_clamp bounds it."""

    surrogate: Surrogate = "clip"
    """What each token adds to the objective. clip: PPO's clipped surrogate, min(s A, clip(s) A). The others need ratio_unit
    token. cispo (MiniMax-M1, ScaleRL): log pi, weighted by the capped ratio. sapo: a soft gate. dppo: without tokens that
    moved too far from the behaviour policy. m2po: without those of the largest log-ratios (AReaL's). m2po_clip: M2PO as its
    authors have it, clipped where a second moment ends, at the earliest at eps. vespo: log pi, weighted by a kernel of the
    product of a sequence's ratios. gmpo: the geometric mean of clipped ratios. Only clip, m2po_clip and gmpo have a clip
    range."""

    cispo_cap: Annotated[float, Range(low=1.0, low_open=True)] = 5.0
    """For surrogate = "cispo": the largest weight of a token. MiniMax-M1 gives no value; 5 is what TRL takes for ScaleRL."""

    sapo_tau_positive: Annotated[float, _POSITIVE] = 1.0
    """For surrogate = "sapo": the gate's temperature where the advantage is positive. A larger one is a narrower gate."""

    sapo_tau_negative: Annotated[float, _POSITIVE] = 1.05
    """For surrogate = "sapo": the gate's temperature where the advantage is not positive."""

    dppo_bound: Annotated[float, _FRACTION] = 0.15
    """For surrogate = "dppo": a token whose probability differs by more from the behaviour policy's is masked, where its
    advantage would move it further."""

    dppo_cap: Annotated[float, Range(low=1.0, low_open=True)] = 20.0
    """For surrogate = "dppo": the largest ratio of a token; its gradient stays. 20 is verl's."""

    m2po_bound: Annotated[float, _POSITIVE] = 0.04
    """For surrogate = "m2po": the largest mean of (log s)^2, nats squared. The largest are masked until the rest of the
    micro-batch is within it. For "m2po_clip": that of the tokens that the clip could reach, which are clipped until then."""

    learning_rate_by_ess: bool = False
    """Multiply the learning rate of each optimizer step by sqrt(rho), the effective sample size of its sequences as a
    fraction, by the products of their tokens' ratios (VCPO, arXiv 2602.17616). It falls with the length."""

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

    @classmethod
    def cispo(cls) -> Self:
        """CISPO as ScaleRL has it (arXiv 2510.13786): the ratio to the engine, capped at 5, over all tokens of the step."""
        return cls(surrogate="cispo", ratio_unit="token", aggregation="token")

    @classmethod
    def sapo(cls) -> Self:
        """SAPO (arXiv 2511.20347): temperatures 1.0 and 1.05, mean over each sequence."""
        return cls(surrogate="sapo", ratio_unit="token")

    @classmethod
    def icepop(cls) -> Self:
        """IcePop (arXiv 2510.18855): GRPO with a token's weight of engine mismatch, 0 outside [0.5, 5].

        We found no clip range that its authors state; this is that of ``grpo``.
        """
        return cls(
            ratio_unit="token", eps_low=0.2, eps_high=0.27, anchor="proximal", tis_mode="reject_tokens", tis_token_cap=5.0
        )

    @classmethod
    def dppo(cls, *, aggregation_tokens: int) -> Self:
        """DPPO-Binary-TV (arXiv 2602.04879): 0.15, against the engine. Its authors train it with Dr. GRPO's aggregation,
        whose ``aggregation_tokens`` is the most tokens of an answer, and without ``normalise_std`` of the advantages."""
        return cls(surrogate="dppo", ratio_unit="token", aggregation="constant", aggregation_tokens=aggregation_tokens)

    @classmethod
    def m2po(cls) -> Self:
        """M2PO (arXiv 2510.01161) as AReaL has it: second moment 0.04, over all tokens of the step."""
        return cls(surrogate="m2po", ratio_unit="token", aggregation="token")

    @classmethod
    def m2po_clip(cls) -> Self:
        """M2PO as its authors have it: 0.04 over the tokens that the clip could reach, and no clip inside 0.7 to 1.5."""
        plain = cls(surrogate="m2po_clip", ratio_unit="token", aggregation="token", eps_low=0.3, eps_high=0.5)
        return replace(plain, clip_calibration="off", noise_z=0.0)

    @classmethod
    def vespo(cls) -> Self:
        """VESPO (arXiv 2602.10693): k and lambda 2 and 3 where the advantage is not negative, else 3 and 2; all tokens of
        the step; log-ratios of tokens within 20, as its authors' code has them."""
        return cls(surrogate="vespo", ratio_unit="token", aggregation="token", log_ratio_clamp=20.0)

    @classmethod
    def gmpo(cls) -> Self:
        """GMPO (arXiv 2507.20673): tokens clipped at e^-0.4 and e^0.4."""
        return cls(
            surrogate="gmpo",
            ratio_unit="token",
            eps_low=-math.expm1(-0.4),
            eps_high=math.expm1(0.4),
            clip_calibration="off",
            noise_z=0.0,
        )

    @classmethod
    def luspo(cls) -> Self:
        """LUSPO (arXiv 2602.05261): GSPO with each sequence's term times its length, and 2e-3 / 2.5e-3."""
        return replace(cls.gspo(), eps_low=2e-3, eps_high=2.5e-3, aggregation="constant", aggregation_tokens=1)

    def __post_init__(self) -> None:
        for field in fields(Objective):
            require_field(field, getattr(self, field.name))
        if self.ratio_unit == "sequence" and max(self.eps_low, self.eps_high) >= GRPO_EPS:
            raise ValueError(
                f"eps_low is {self.eps_low}, eps_high is {self.eps_high} with ratio_unit 'sequence': nothing would ever "
                "be clipped. The GSPO paper clips sequence ratios at 3e-4 / 4e-4; 0.2 / 0.27 are GRPO's values, for "
                "ratio_unit 'token'"
            )
        if self.ratio_unit == "token" and self.has_clip_range and min(self.eps_low, self.eps_high) < SMALLEST_TOKEN_EPS:
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
        require_consistent(self)

    @property
    def is_calibrated(self) -> bool:
        """Whether the clip range is widened by what ``gspo.calibration`` measures: ``clip_calibration``, or what not setting
        it means."""
        if self.clip_calibration is not None or not self.has_clip_range:
            return self.clip_calibration == "widen"
        return self.anchor == "behaviour" and self.clip_range_growth == 0

    @property
    def has_clip_range(self) -> bool:
        """Whether ratios are clipped at eps_low and eps_high."""
        return self.surrogate not in WITHOUT_RANGE

    @property
    def weight_mode(self) -> TisMode:
        """The mode in effect: ``tis_mode``, or what not setting it means for this anchor."""
        if self.tis_mode is not None:
            return self.tis_mode
        return "truncate" if self.anchor == "proximal" else "off"

    @property
    def weight_cap(self) -> float:
        """The cap that belongs to ``weight_mode``."""
        tokens = dict.fromkeys(("truncate_tokens", "reject_tokens"), self.tis_token_cap)
        caps = {**tokens, "truncate_product": self.tis_product_cap}
        return caps.get(self.weight_mode, self.tis_cap)

    @property
    def needs_proximal_logprobs(self) -> bool:
        """Whether each batch needs one forward pass more, under the weights at its start."""
        return self.anchor == "proximal"

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether the loss takes the log-probs of a reference model."""
        return self.kl_coefficient > 0 and self.kl_in == "loss"


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
