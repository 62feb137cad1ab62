"""The rivals of the clip: values and gradients are the oracle's, alone and with each option; what they ignore is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from gspo.loss import LossOutput, objective_loss
from gspo.padded import padded_loss
from gspo.settings import Objective
from tests.support.loss.gspo_copies import GSPO, Gspo, copy_of_gspo, source_of
from tests.support.loss.option_cases import (
    EPISODES,
    OPTIONS,
    RIVALS,
    RIVALS_WITH_OPTIONS,
    fast_loss,
    objective_of,
    random_case,
    without_actions,
)

TOLERANCE = 1e-12
PROXIMAL = [name for name, changed in OPTIONS.items() if changed.get("anchor") == "proximal"]
REFUSED = {
    *((rival, "dual clip") for rival in RIVALS),
    *((rival, "range by lag and sigma") for rival in RIVALS if rival not in ("gmpo", "m2po_clip")),
    *((rival, name) for rival in ("dppo", "m2po", "m2po_clip", "vespo") for name in PROXIMAL),
    ("cispo", "clamp"),
    ("dppo", "clamp"),
}
ALONE_AND_IN_PAIRS = [*((rival,) for rival in RIVALS), *(pair for pair in RIVALS_WITH_OPTIONS if pair not in REFUSED)]


def agrees_with_the_oracle(library: Gspo, names: tuple[str, ...], seed: int) -> None:
    objective = objective_of(names)
    case = random_case(Random(seed), objective, episodes=EPISODES in names)
    members = list(range(len(case.sequences)))
    expected, cut = case.oracle(objective), len(members) // 2
    # The tokens that M2PO masks or clips are those of a call.
    splits = (
        [[members]]
        if {"m2po", "m2po_clip"} & set(names)
        else [[members], [part for part in (members[cut:], members[:cut]) if part]]
    )
    for parts in splits:
        actual = fast_loss(objective, case, parts, library=library)
        assert actual.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE), f"seed {seed}, parts {parts}"
        for what in ("by_logprob", "by_entropy"):
            for row, expected_row in zip(getattr(actual, what), getattr(expected, what), strict=True):
                assert row == pytest.approx(expected_row, rel=TOLERANCE, abs=TOLERANCE), f"{what}, seed {seed}, {parts}"


@pytest.mark.parametrize("names", ALONE_AND_IN_PAIRS, ids=" and ".join)
def test_values_and_gradients_are_the_oracles(names: tuple[str, ...]) -> None:
    for seed in range(8 if len(names) == 1 else 3):
        agrees_with_the_oracle(GSPO, names, seed)


@pytest.mark.parametrize("names", sorted(REFUSED), ids=" and ".join)
def test_a_rival_refuses_what_it_would_ignore_and_names_both(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"is .* with (surrogate|log_ratio_clamp) .*(Set|set|Leave) ") as raised:
        objective_of(names)
    assert names[0] in str(raised.value)


def agrees_on_every_seed(library: Gspo, names: tuple[str, ...]) -> None:
    for seed in range(8):
        agrees_with_the_oracle(library, names, seed)


BUGS = [
    ("cispo", "x.log_s_T.detach().clamp(max=math.log(cap)).exp()", "x.log_s_T.clamp(max=math.log(cap)).exp()"),
    ("cispo", "x.log_s_T.detach().clamp(max=math.log(cap))", "x.log_s_T.detach().clamp(min=math.log(cap))"),
    ("cispo", "weight_T * x.weighted_T * x.inputs.logp_T", "weight_T * x.weighted_T.abs() * x.inputs.logp_T"),
    (
        "sapo",
        "tau_negative).masked_fill(x.weighted_T > 0, tau_positive)",
        "tau_positive).masked_fill(x.weighted_T > 0, tau_negative)",
    ),
    (
        "sapo",
        "torch.full_like(x.weighted_T, tau_negative).masked_fill(x.weighted_T > 0, tau_positive)",
        "torch.where(x.weighted_T > 0, tau_positive, tau_negative)",
    ),
    ("sapo", "tau_T * (x.log_s_T.exp() - 1)", "tau_T * x.log_s_T.exp()"),
    ("sapo", "Terms(4 / tau_T * gate_T * x.weighted_T", "Terms(gate_T * x.weighted_T"),
    ("dppo", "(x.weighted_T > 0) & (shift_T > bound)", "(x.weighted_T < 0) & (shift_T > bound)"),
    ("dppo", "x.inputs.logp_T.detach().exp() - x.inputs.anchor_T.exp()", "x.log_s_T.detach().exp() - 1"),
    ("dppo", "torch.where(high_T | low_T, 0.0, ratio_T", "torch.where(high_T | low_T, ratio_T.detach(), ratio_T"),
    ("dppo", "(x.log_s_T.detach() - math.log(cap)).clamp", "(x.log_s_T - math.log(cap)).clamp"),
    ("m2po", "torch.where(kept_T, x.log_s_T", "torch.where(~kept_T, x.log_s_T"),
    ("m2po", ".sort(stable=True)", ".sort(stable=True, descending=True)"),
    ("m2po", "torch.where(mask_T, moved_T.double().square(), math.inf)", "moved_T.double().square()"),
    ("m2po_clip", "moved_T.sign() * x.weighted_T.sign() > 0", "x.weighted_T != 0"),
    ("m2po_clip", "(sorted_T - M2PO_LESS) * (num - count_T)", "0"),
    ("m2po_clip", "torch.where(within, math.inf, ", "torch.where(within, 0.0, "),
    ("m2po_clip", "(largest - M2PO_LESS).clamp", "largest.clamp"),
    ("m2po_clip", "x.log_lo_T.double().minimum(-tau)", "-tau.expand_as(moved_T)"),
    ("m2po_clip", "x.log_hi_T.double().maximum(tau)", "x.log_hi_T"),
    ("vespo", "sums_S.clamp(*VESPO_REACH)", "sums_S.clamp(0.0, VESPO_REACH[1])"),
    ("vespo", "l_T + k_T * log_w_T", "k_T * log_w_T"),
    ("vespo", "negative_T = x.weighted_T < 0", "negative_T = x.weighted_T > 0"),
    ("vespo", "sums_S.clamp(*VESPO_REACH)[inputs.sequence_ids_T]", "x.log_s_T.detach().double()"),
    ("vespo", "phi_T * x.weighted_T * inputs.logp_T", "phi_T * x.weighted_T * x.log_s_T"),
    ("gmpo", "inputs, value_T = x.inputs, clipped_T.detach()", "inputs, value_T = x.inputs, x.log_s_T.detach()"),
    ("gmpo", "torch.where(plain.high_T, x.log_hi_T, x.log_lo_T)", "torch.where(plain.high_T, x.log_lo_T, x.log_hi_T)"),
    ("gmpo", "clipped_T - value_T + mean_S", "x.log_s_T - x.log_s_T.detach() + mean_S"),
]


@pytest.mark.parametrize(("rival", "right", "wrong"), BUGS, ids=lambda value: value)
def test_a_planted_bug_is_caught(rival: str, right: str, wrong: str) -> None:
    source = source_of("options/surrogates.py")
    assert source.count(right) == 1
    mutant = copy_of_gspo({"options/surrogates.py": source.replace(right, wrong)})
    with pytest.raises(AssertionError):
        agrees_on_every_seed(mutant, (rival,))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("delta_T < math.log(floor)", "delta_T > math.log(floor)"),
        ("(delta_T > math.log(cap)), 0.0, weights_T", "(delta_T > math.log(cap)), weights_T, 0.0"),
    ],
)
def test_a_planted_bug_of_icepops_mask_is_caught(right: str, wrong: str) -> None:
    source = source_of("mismatch.py")
    assert source.count(right) == 1
    mutant = copy_of_gspo({"mismatch.py": source.replace(right, wrong)})
    with pytest.raises(AssertionError):
        agrees_on_every_seed(mutant, ("icepop mask",))


def loss_of(objective: Objective, log_ratios: list[float], advantage: float = 1.0, **more: Any) -> tuple[LossOutput, list]:
    """Of one sequence at probabilities of e^-1, and the gradient of J by its log-probs times its length."""
    anchor_T = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    logprobs_T = (anchor_T + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    output = objective_loss(
        objective,
        logprobs_T,
        anchor_T,
        torch.full_like(anchor_T, advantage),
        torch.ones(len(log_ratios), dtype=torch.bool),
        torch.zeros(len(log_ratios), dtype=torch.int64),
        num_sequences=1,
        num_tokens=len(log_ratios) if objective.aggregation == "token" else None,
        **more,
    )
    output.loss.backward()
    assert logprobs_T.grad is not None
    return output, (-logprobs_T.grad * len(log_ratios)).tolist()


PRESETS = [
    Objective.cispo(), Objective.sapo(), Objective.m2po(), Objective.m2po_clip(), Objective.vespo(), Objective.gmpo(),
]  # fmt: skip


@pytest.mark.parametrize("objective", PRESETS, ids=lambda objective: objective.surrogate)
def test_at_ratio_one_each_has_the_gradient_of_policy_gradient(objective: Objective) -> None:
    assert loss_of(objective, [0.0, 0.0, 0.0], -0.5)[1] == pytest.approx([-0.5] * 3, rel=1e-14)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_with_wide_bounds_each_has_the_gradient_of_the_unclipped_ratio(advantage: float) -> None:
    moved = [-0.7, 0.1, 0.5]
    wide = [
        Objective(surrogate="cispo", ratio_unit="token", cispo_cap=1e3),
        Objective(surrogate="dppo", ratio_unit="token", dppo_bound=0.999, dppo_cap=1e3),
        Objective(surrogate="m2po", ratio_unit="token", m2po_bound=1e3),
        replace(Objective.m2po_clip(), m2po_bound=1e3),
    ]
    for objective in wide:
        output, gradient = loss_of(objective, moved, advantage)
        assert gradient == pytest.approx([advantage * torch.tensor(x).double().exp().item() for x in moved], rel=1e-6)
        assert output.stats.clipped_high_S.item() == output.stats.clipped_low_S.item() == 0.0


def test_gmpo_within_its_range_is_gspo() -> None:
    wide, gspo = Objective.gmpo(), Objective(eps_low=0.19, eps_high=0.19, clip_calibration="off", noise_z=0.0)
    moved = [-0.3, 0.2, 0.25]
    assert loss_of(wide, moved)[0].loss.item() == pytest.approx(loss_of(gspo, moved)[0].loss.item(), rel=1e-14)
    assert loss_of(wide, moved)[1] == pytest.approx(loss_of(gspo, moved)[1], rel=1e-14)


def test_luspo_is_gspo_times_the_length() -> None:
    objective = Objective.luspo()
    plain = Objective(eps_low=2e-3, eps_high=2.5e-3, clip_calibration="off", noise_z=0.0)
    for moved in ([1e-3, -2e-3, 0.5e-3], [0.5, 0.1]):
        ours, theirs = loss_of(objective, moved), loss_of(plain, moved)
        assert ours[0].loss.item() == pytest.approx(len(moved) * theirs[0].loss.item(), rel=1e-14)
        assert ours[1] == pytest.approx([len(moved) * slope for slope in theirs[1]], rel=1e-14)


def test_a_narrow_gate_of_sapo_removes_more_and_says_how_much() -> None:
    shares = []
    for tau in (0.01, 1.0, 4.0):
        objective = Objective(surrogate="sapo", ratio_unit="token", sapo_tau_positive=tau)
        output, gradient = loss_of(objective, [0.4, 0.4])
        share = output.stats.clipped_high_S.item()
        assert gradient[0] == pytest.approx((1 - share) * math.exp(0.4), rel=1e-14)
        shares.append(share)
    assert 0 < shares[0] < 1e-4 < shares[1] < shares[2] < 1


@pytest.mark.parametrize(
    ("objective", "log_ratios", "advantage", "shares"),
    [
        (Objective.cispo(), [2.0, 1.0, 1.0, 1.0], -1.0, (0.25, 0.0)),
        (Objective(surrogate="dppo", ratio_unit="token"), [0.9, 0.1, -0.9, 0.0], 1.0, (0.25, 0.0)),
        (Objective(surrogate="dppo", ratio_unit="token"), [0.9, 0.1, -0.9, 0.0], -1.0, (0.0, 0.25)),
        (Objective.m2po(), [0.9, 0.1, -0.9, 0.0], 1.0, (0.25, 0.25)),
        (Objective.m2po_clip(), [0.9, 0.1, -0.9, 0.0], 1.0, (0.25, 0.0)),
        (Objective.m2po_clip(), [0.9, 0.1, -0.9, 0.0], -1.0, (0.0, 0.25)),
        (Objective.gmpo(), [0.9, 0.1, -0.9, 0.0], 1.0, (0.25, 0.0)),
    ],
)
def test_clip_fractions_say_what_a_rival_took(
    objective: Objective, log_ratios: list[float], advantage: float, shares: tuple[float, float]
) -> None:
    stats = loss_of(objective, log_ratios, advantage)[0].stats
    assert (stats.clipped_high_S.item(), stats.clipped_low_S.item()) == shares
    assert bool(stats.clip_high_S.isnan()) is (not objective.has_clip_range)


def test_icepop_counts_the_tokens_that_it_masks() -> None:
    proximal_T = torch.tensor([-1.0, 1.0, -1.8, -0.8], dtype=torch.float64)  # ratios e^0, e^2, e^-0.8, e^0.2
    stats = loss_of(Objective.icepop(), [0.0] * 4, proximal_logprobs_T=proximal_T)[0].stats
    assert stats.masked_S.item() == 0.5


def test_m2pos_bound_holds_in_any_split() -> None:
    objective = objective_of(("m2po",))
    for seed in range(20):
        case = random_case(Random(seed), objective, episodes=False)
        result = fast_loss(objective, case, [[i] for i in range(len(case.sequences))])
        left = [
            (y.logprobs[t] - y.behaviour[t]) ** 2
            for y, slopes in zip(case.sequences, result.by_logprob, strict=True)
            for t in y.actions
            if slopes[t] != 0.0
        ]
        with_signal = all(y.advantages[t] != 0 for y in case.sequences for t in y.actions)
        assert not with_signal or sum(left) <= objective.m2po_bound * len(left) + 1e-12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"surrogate": "ppo"}, "surrogate is 'ppo'; choose one of clip, cispo, sapo, dppo, m2po, m2po_clip, vespo, gmpo"),
        ({"surrogate": "cispo"}, "surrogate is 'cispo' with ratio_unit 'sequence'.*Set ratio_unit = 'token'"),
        (
            {"surrogate": "cispo", "ratio_unit": "token", "m2po_bound": 0.1},
            "m2po_bound is 0.1 with surrogate 'cispo'.*set surrogate = 'm2po'",
        ),
        ({"sapo_tau_negative": 2.0}, "sapo_tau_negative is 2.0 with surrogate 'clip'.*set surrogate = 'sapo'"),
        (
            {"surrogate": "sapo", "ratio_unit": "token", "clip_calibration": "widen"},
            "clip_calibration is 'widen' with surrogate 'sapo'.*Leave clip_calibration out",
        ),
        (
            {"surrogate": "m2po", "ratio_unit": "token", "adaptive_clip_target": 0.1},
            "adaptive_clip_target is 0.1 with surrogate 'm2po'",
        ),
        ({"tis_token_floor": 0.3}, "tis_token_floor is 0.3 with tis_mode None.*set tis_mode = 'reject_tokens'"),
        (
            {"surrogate": "cispo", "ratio_unit": "token", "log_ratio_clamp": 1.0},
            "cispo_cap is 5.0 with log_ratio_clamp 1.0.*Set log_ratio_clamp above 1.61",
        ),
    ],
)
def test_two_rivals_or_a_setting_without_use_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**fields)


def test_the_presets_have_the_settings_of_their_authors() -> None:
    assert Objective.cispo().cispo_cap == 5.0
    assert (Objective.sapo().sapo_tau_positive, Objective.sapo().sapo_tau_negative) == (1.0, 1.05)
    assert (Objective.icepop().tis_token_floor, Objective.icepop().weight_cap) == (0.5, 5.0)
    assert (Objective.dppo(aggregation_tokens=9).dppo_bound, Objective.m2po().m2po_bound) == (0.15, 0.04)
    assert (Objective.m2po_clip().eps_low, Objective.m2po_clip().eps_high) == (0.3, 0.5)
    assert (Objective.luspo().eps_low, Objective.luspo().eps_high) == (2e-3, 2.5e-3)
    assert (Objective.gmpo().eps_low, Objective.gmpo().eps_high) == pytest.approx((0.329680, 0.491825), abs=1e-6)
    with pytest.raises(ValueError, match=r"dual_clip is 3\.0 with a surrogate"):
        loss_with_both()


def loss_with_both() -> None:
    from gspo.loss import gspo_loss
    from gspo.options.surrogates import gmpo
    from gspo.staleness import clip_range

    one_T, wide = torch.zeros(1), clip_range(torch.zeros(1), eps_low=0.2, eps_high=0.2)
    gspo_loss(one_T, one_T, one_T, one_T == 0, one_T.long(), num_sequences=1, clip_range=wide, surrogate=gmpo, dual_clip=3.0)


@pytest.mark.parametrize("rival", RIVALS)
def test_rows_with_padding_and_a_step_without_actions(rival: str) -> None:
    objective = objective_of((rival,))
    generator = torch.Generator().manual_seed(1)
    logprobs_SL = -torch.rand(3, 5, generator=generator, dtype=torch.float64)
    behaviour_SL = logprobs_SL + 0.3 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    advantages_S, lengths_S = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64), torch.tensor([5, 2, 0])
    mask_SL = torch.arange(5) < lengths_S[:, None]
    padded = padded_loss(objective, logprobs_SL, behaviour_SL, advantages_S, mask_SL, num_sequences=3)
    packed = objective_loss(
        objective,
        logprobs_SL[mask_SL],
        behaviour_SL[mask_SL],
        advantages_S.repeat_interleave(lengths_S),
        mask_SL[mask_SL],
        torch.arange(3).repeat_interleave(lengths_S),
        num_sequences=3,
        lag_S=torch.zeros(3),
    )
    assert padded.loss.item() == packed.loss.item() != 0.0
    case = without_actions(random_case(Random(3), objective, episodes=False))
    result = fast_loss(objective, case, [list(range(len(case.sequences)))])
    assert result.loss == 0.0
    assert not any(slope for row in result.by_logprob for slope in row)
