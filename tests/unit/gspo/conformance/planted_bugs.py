"""Bugs that the conformance suite must catch: each changes one place in the library and names the property that must fail.

Many of them have been in public training systems, or are one slip away.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.unit.gspo.conformance.properties import (
    Property,
    a_clamped_ratio_keeps_its_gradient,
    a_step_without_actions_gives_zero_with_a_live_graph,
    at_ratio_one_it_is_the_policy_gradient,
    empty_rows_add_nothing,
    equal_advantages_make_it_gspo,
    fresh_tokens_have_the_papers_clip,
    only_the_policys_log_probs_carry_a_gradient,
    splits_and_ranks_add_up,
    the_gradient_is_the_derivative_of_the_value,
    the_loss_is_the_formula,
    token_ratios_make_it_grpo,
)


@dataclass(frozen=True)
class PlantedBug:
    name: str
    file: str
    """Its path in gspo/."""
    right: str
    """Text that occurs exactly once in the file."""
    wrong: str
    caught_by: Property


BUGS_OF_THE_LOSS = (
    # Reductions
    PlantedBug(
        "sums over tokens divided by all tokens: a length-weighted loss",
        "loss.py",
        "/ divisors\n    loss",
        "* x.num_local / x.num_tokens_S.sum().clamp(min=1)\n    loss",
        the_loss_is_the_formula,
    ),
    PlantedBug(
        "mean of micro-batch means",
        "loss.py",
        "loss = -objective_S.sum() / num_sequences",
        "loss = -objective_S.mean()",
        splits_and_ranks_add_up,
    ),
    PlantedBug(
        "divided by the sequences that have tokens instead of N",
        "loss.py",
        "loss = -objective_S.sum() / num_sequences",
        "loss = -objective_S.sum() / (x.num_tokens_S > 0).sum().clamp(min=1)",
        splits_and_ranks_add_up,
    ),
    PlantedBug(
        "the sum of an empty row is divided by zero",
        "options/aggregation.py",
        "return num_tokens_S.clamp(min=1)",
        "return num_tokens_S",
        empty_rows_add_nothing,
    ),
    PlantedBug(
        "the mean of an empty unit is divided by zero",
        "inputs/units.py",
        "/ counts.clamp(min=1)",
        "/ counts",
        a_step_without_actions_gives_zero_with_a_live_graph,
    ),
    PlantedBug(
        "means over all tokens, observations too",
        "inputs/units.py",
        "segment_sum(mask_T.to(values_T.dtype), ids_T, num_segments)",
        "segment_sum(torch.ones_like(values_T), ids_T, num_segments)",
        the_loss_is_the_formula,
    ),
    PlantedBug(
        "the loss of a micro-batch without actions leaves the graph",
        "loss.py",
        "loss = -objective_S.sum() / num_sequences",
        "loss = -objective_S.sum() / num_sequences if x.mask_T.any() else torch.zeros(())",
        a_step_without_actions_gives_zero_with_a_live_graph,
    ),
    # Ratio
    PlantedBug(
        "the ratio is the product over the sequence: not length-normalised",
        "loss.py",
        "mean_delta_U = segment_mean(delta_T, x.mask_T, unit_T, x.units.num_units)",
        "mean_delta_U = segment_sum(delta_T, unit_T, x.units.num_units)",
        equal_advantages_make_it_gspo,
    ),
    PlantedBug(
        "missing stop-gradient on s_u: the gradient is counted twice",
        "loss.py",
        "delta_T = x.logp_T.detach() - x.anchor_T",
        "delta_T = x.logp_T - x.anchor_T",
        the_gradient_is_the_derivative_of_the_value,
    ),
    PlantedBug(
        "stop-gradient on everything",
        "loss.py",
        "(x.logp_T - x.logp_T.detach()) +",
        "0.0 * x.logp_T +",
        at_ratio_one_it_is_the_policy_gradient,
    ),
    PlantedBug(
        "gradient through the sequence mean instead of the token: turn credit is smeared",
        "loss.py",
        "(x.logp_T - x.logp_T.detach()) + log_s_U[unit_T]",
        "(lambda z_U: z_U - z_U.detach() + log_s_U)(segment_mean(x.logp_T, x.mask_T, unit_T, x.units.num_units))[unit_T]",
        the_loss_is_the_formula,
    ),
    PlantedBug(
        "the anchor carries a gradient",
        "inputs/loss_inputs.py",
        "anchor_logprobs_T.detach().to(dtype)",
        "anchor_logprobs_T.to(dtype)",
        only_the_policys_log_probs_carry_a_gradient,
    ),
    PlantedBug(
        "the advantages carry a gradient",
        "inputs/loss_inputs.py",
        "advantages_T.detach().to(dtype)",
        "advantages_T.to(dtype)",
        only_the_policys_log_probs_carry_a_gradient,
    ),
    PlantedBug(
        "the mismatch weights carry a gradient",
        "inputs/loss_inputs.py",
        "mismatch_weights_S.detach()",
        "mismatch_weights_S",
        only_the_policys_log_probs_carry_a_gradient,
    ),
    PlantedBug(
        "the clamp of the ratio cuts the gradient",
        "loss.py",
        "log_s_T = (x.logp_T - x.logp_T.detach()) + log_s_U[unit_T]",
        "log_s_T = (x.logp_T - x.logp_T.detach() + mean_delta_U[unit_T]).clamp(-log_ratio_clamp, log_ratio_clamp)",
        a_clamped_ratio_keeps_its_gradient,
    ),
    PlantedBug(
        "no clamp on the ratio",
        "loss.py",
        "log_s_U = mean_delta_U.clamp(-log_ratio_clamp, log_ratio_clamp)",
        "log_s_U = mean_delta_U",
        a_clamped_ratio_keeps_its_gradient,
    ),
    PlantedBug(
        "turns of different sequences share a ratio",
        "inputs/units.py",
        "sequence_ids_T.long() * MAX_TURN_ID + turn_ids_T.long()",
        "turn_ids_T.long()",
        the_loss_is_the_formula,
    ),
    # Clip
    PlantedBug(
        "clipped above whatever the sign of the advantage",
        "options/surrogates.py",
        "high_T = (x.weighted_T > 0) & (x.log_s_T > x.log_hi_T)",
        "high_T = x.log_s_T > x.log_hi_T",
        the_loss_is_the_formula,
    ),
    PlantedBug(
        "clipped on the wrong side",
        "options/surrogates.py",
        "high_T = (x.weighted_T > 0) & (x.log_s_T >",
        "high_T = (x.weighted_T < 0) & (x.log_s_T >",
        equal_advantages_make_it_gspo,
    ),
    PlantedBug(
        "the lower bound is forgotten",
        "options/surrogates.py",
        "low_T = (x.weighted_T < 0) & (x.log_s_T < x.log_lo_T)",
        "low_T = (x.weighted_T < 0) & (x.log_s_T < -1e9)",
        token_ratios_make_it_grpo,
    ),
    PlantedBug(
        "eps_low and eps_high swapped",
        "staleness.py",
        "width_S * math.log1p(-eps_low), width_S * math.log1p(eps_high)",
        "width_S * math.log1p(-eps_high), width_S * math.log1p(eps_low)",
        fresh_tokens_have_the_papers_clip,
    ),
    PlantedBug(
        "eps used as a bound of the log-ratio",
        "staleness.py",
        "width_S * math.log1p(-eps_low), width_S * math.log1p(eps_high)",
        "-width_S * eps_low, width_S * eps_high",
        token_ratios_make_it_grpo,
    ),
    PlantedBug(
        "clip fractions of both sides are those of one",
        "loss.py",
        "clipped_low_S=x.mean_S(terms.low_T if",
        "clipped_low_S=x.mean_S(terms.high_T if",
        the_loss_is_the_formula,
    ),
)
