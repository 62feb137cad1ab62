"""The properties of which the conformance of a loss consists."""

from __future__ import annotations

from tests.unit.gspo.conformance import properties, properties_of_parts
from tests.unit.gspo.conformance.properties import Property

PROPERTIES: tuple[Property, ...] = (
    properties.the_loss_is_the_formula,
    properties.a_clamped_ratio_keeps_its_gradient,
    properties.padded_is_packed,
    properties.splits_and_ranks_add_up,
    properties.empty_rows_add_nothing,
    properties.a_step_without_actions_gives_zero_with_a_live_graph,
    properties.the_order_of_sequences_does_not_matter,
    properties.equal_advantages_make_it_gspo,
    properties.token_ratios_make_it_grpo,
    properties.fresh_tokens_have_the_papers_clip,
    properties.at_ratio_one_it_is_the_policy_gradient,
    properties.the_gradient_is_the_derivative_of_the_value,
    properties.only_the_policys_log_probs_carry_a_gradient,
    properties_of_parts.the_mismatch_is_counted_once,
    properties_of_parts.rejection_changes_neither_n_nor_N,
    properties_of_parts.tokens_left_out_after_sampling_count_in_n,
    properties_of_parts.the_lag_is_the_mean_over_action_tokens,
    properties_of_parts.advantages_are_relative_to_the_members_present,
    properties_of_parts.advantages_depend_on_neither_offset_nor_scale_of_the_rewards,
    properties_of_parts.the_deviation_has_one_millionth_added,
    properties_of_parts.moments_are_those_of_fresh_action_tokens,
    properties_of_parts.the_mismatch_kl_is_k3,
    properties_of_parts.summaries_are_over_sequences_by_sign_and_lag,
    properties_of_parts.more_clipping_than_wanted_widens_the_clip_range,
    properties_of_parts.bad_arguments_are_named,
)
