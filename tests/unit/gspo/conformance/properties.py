"""The required behaviour of a GSPO implementation, as functions of the implementation and a random step.

``test_conformance`` calls each with the library on steps from hypothesis. ``test_planted_bugs`` calls them with copies of
the library that carry a planted bug, and each bug must make its property raise AssertionError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from random import Random

import torch
from torch import Tensor

from gspo.loss import LossOutput
from gspo.model.micro_batches import plan_micro_batches
from gspo.reference import ReferenceResult, ReferenceSequence, reference_grpo, reference_gspo
from gspo.settings import RatioUnit
from tests.support.loss.gspo_copies import Gspo
from tests.support.loss.loss_cases import EPS_HIGH, EPS_LOW, Flat, Step, distance_to_a_bound, pack, pad

Property = Callable[[Gspo, Step], None]

UNITS: tuple[RatioUnit, ...] = ("sequence", "turn", "token")
F64 = torch.float64
EMPTY = ReferenceSequence(logprobs=[], anchor_logprobs=[], advantages=[], mask=[], turns=[])
MASKED = ReferenceSequence(
    logprobs=[math.nan] * 2, anchor_logprobs=[-1.0] * 2, advantages=[1.0] * 2, mask=[False] * 2, turns=[0, 0]
)


def close(actual: float, expected: float, tolerance: float, what: str) -> None:
    """Compare relatively, or absolutely below 1; NaN is close to nothing."""
    assert abs(actual - expected) <= tolerance * max(1.0, abs(expected)), f"{what}: {actual} is not {expected}"


def all_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def agrees(flat: Flat, output: LossOutput, expected: ReferenceResult, what: str, tolerance: float = 1e-12) -> None:
    """Compare value, gradient and clip decisions."""
    close(output.loss.item(), expected.loss, tolerance, f"loss, {what}")
    gradient_T = torch.tensor([g for row in expected.gradients for g in row], dtype=F64)
    all_close(flat.gradient(output), gradient_T, tolerance, f"gradient, {what}")
    for i, row in enumerate(expected.clipped):
        num_tokens = max(output.stats.num_tokens_S[i].item(), 1)
        for side, column in ((1, output.stats.clipped_high_S), (-1, output.stats.clipped_low_S)):
            close(column[i].item(), row.count(side) / num_tokens, 1e-6, f"clipped tokens on side {side}, {what}")


def the_loss_is_the_formula(gspo: Gspo, step: Step) -> None:
    """Value, gradient, clip decisions and n_i equal the slow float64 loops, for every unit, in both dtypes."""
    for unit in UNITS:
        expected = step.reference(unit)
        for dtype, tolerance in ((F64, 1e-12), (torch.float32, 2e-6)):
            if dtype == torch.float32 and distance_to_a_bound(step) < 2e-6:
                continue
            flat = pack(step.sequences, dtype)
            output = step.loss(flat, unit, gspo)
            agrees(flat, output, expected, f"unit {unit}, {dtype}", tolerance)
            assert output.stats.num_tokens_S.tolist() == [float(sum(s.mask)) for s in step.sequences]
            close(-output.stats.objective_S.sum().item() / step.num_sequences, expected.loss, tolerance, "objective_S")


def a_clamped_ratio_keeps_its_gradient(gspo: Gspo, step: Step) -> None:
    """Log-ratios beyond the clamp are clamped and counted; their gradient has the clamped ratio as its factor."""
    step, clamp = step.stretched(1000.0), 0.5
    for unit in UNITS:
        flat = pack(step.sequences, F64)
        output = step.loss(flat, unit, gspo, log_ratio_clamp=clamp)
        agrees(flat, output, step.reference(unit, log_ratio_clamp=clamp), f"unit {unit}, clamped")
    for i, sequence in enumerate(step.sequences):
        deltas = [p - a for p, a, m in zip(sequence.logprobs, sequence.anchor_logprobs, sequence.mask, strict=True) if m]
        assert output.stats.clamped_tokens_S[i].item() == sum(abs(delta) > clamp for delta in deltas)


def padded_is_packed(gspo: Gspo, step: Step) -> None:
    """Padded and packed agree to the bit, with NaN and impossible ids in the padding and at observation tokens."""
    hidden = [
        replace(
            s,
            logprobs=[x if m else math.nan for x, m in zip(s.logprobs, s.mask, strict=True)],
            advantages=[x if m else math.nan for x, m in zip(s.advantages, s.mask, strict=True)],
        )
        for s in step.sequences
    ]
    for unit in UNITS:
        packed, padded, nan = pack(step.sequences), pad(step.sequences), pack(hidden)
        packed_output, padded_output = step.loss(packed, unit, gspo), step.loss(padded, unit, gspo)
        assert torch.equal(packed_output.loss, padded_output.loss), f"{packed_output.loss} is not {padded_output.loss}"
        inside_T = padded.sequence_ids_T >= 0
        gradient_T, padded_gradient_T = packed.gradient(packed_output), padded.gradient(padded_output)
        assert torch.equal(gradient_T, padded_gradient_T[inside_T])
        assert padded_gradient_T[~inside_T].abs().sum().item() == 0.0
        assert torch.equal(gradient_T, nan.gradient(step.loss(nan, unit, gspo)))


def splits_and_ranks_add_up(gspo: Gspo, step: Step) -> None:
    """Losses and gradients of the micro-batches of 1 to 4 ranks, idle ones included, add up to those of the step."""
    lengths = [len(s.mask) for s in step.sequences]
    for num_ranks in range(1, 5):
        unit = UNITS[(num_ranks + len(lengths)) % 3]
        whole = pack(step.sequences, F64)
        output = step.loss(whole, unit, gspo)
        expected = whole.gradient(output).split(lengths)
        loss, parts = 0.0, []
        for members in chain.from_iterable(plan_micro_batches(lengths, 16, num_ranks)):
            flat = pack([step.sequences[i] for i in members] or [EMPTY], F64)
            part = step.loss(flat, unit, gspo)
            loss += part.loss.item()
            parts.append(part.stats)
            for i, gradient_T in zip(members, flat.gradient(part).split([lengths[i] for i in members]), strict=True):
                all_close(gradient_T, expected[i], 1e-12, f"gradient of sequence {i} on {num_ranks} ranks")
        close(loss, output.loss.item(), 1e-12, f"loss on {num_ranks} ranks, unit {unit}")
        merged = gspo.diagnostics.summarise(gspo.diagnostics.SequenceStats.merge(parts))
        expected_summary = gspo.diagnostics.summarise(output.stats)
        expected_summary["sequences_empty/all"] += sum(part.num_tokens_S.shape[0] for part in parts) - len(lengths)
        for name, value in expected_summary.items():
            close(merged[name], value, 1e-9, name)


def empty_rows_add_nothing(gspo: Gspo, step: Step) -> None:
    """Sequences without tokens or action tokens change neither loss nor gradient at the same N; statistics stay finite."""
    with_rows: list[ReferenceSequence] = [EMPTY]
    for sequence in step.sequences:
        with_rows += [sequence, EMPTY, MASKED]
    for unit in UNITS:
        flat, longer = pack(step.sequences, F64), pack(with_rows, F64)
        output = step.loss(flat, unit, gspo)
        longer_output = step.loss(longer, unit, gspo)
        close(longer_output.loss.item(), output.loss.item(), 1e-12, "loss with empty rows")
        of_step_T = longer.sequence_ids_T % 3 == 1
        gradient_T = longer.gradient(longer_output)
        assert torch.equal(gradient_T[of_step_T], flat.gradient(output))
        assert gradient_T[~of_step_T].abs().sum().item() == 0.0
        summary = gspo.diagnostics.summarise(output.stats)
        for name, value in gspo.diagnostics.summarise(longer_output.stats).items():
            assert math.isfinite(value), f"{name} is {value}"
            if name != "sequences_empty/all":
                close(value, summary[name], 1e-9, name)


def a_step_without_actions_gives_zero_with_a_live_graph(gspo: Gspo, step: Step) -> None:
    for sequences in ([EMPTY], [MASKED, EMPTY], [replace(s, mask=[False] * len(s.mask)) for s in step.sequences]):
        for unit in UNITS:
            flat = pack(sequences)
            output = step.loss(flat, unit, gspo)
            assert output.loss.item() == 0.0
            assert flat.gradient(output).abs().sum().item() == 0.0


def the_order_of_sequences_does_not_matter(gspo: Gspo, step: Step) -> None:
    order = list(range(len(step.sequences)))
    Random(0).shuffle(order)
    lengths = [len(s.mask) for s in step.sequences]
    for unit in UNITS:
        flat, shuffled = pack(step.sequences, F64), pack([step.sequences[i] for i in order], F64)
        output, shuffled_output = step.loss(flat, unit, gspo), step.loss(shuffled, unit, gspo)
        close(shuffled_output.loss.item(), output.loss.item(), 1e-12, "loss in another order")
        expected = flat.gradient(output).split(lengths)
        actual = shuffled.gradient(shuffled_output).split([lengths[i] for i in order])
        for i, gradient_T in zip(order, actual, strict=True):
            all_close(gradient_T, expected[i], 1e-12, f"gradient of sequence {i}")


def equal_advantages_make_it_gspo(gspo: Gspo, step: Step) -> None:
    """It is the paper's sequence-level objective, whatever the lag; so is ``Objective.gspo()``."""
    step = step.with_paper_advantages()
    flat = pack(step.sequences, F64)
    arguments = {"num_sequences": step.num_sequences, "eps_low": EPS_LOW, "eps_high": EPS_HIGH}
    expected = reference_gspo(step.sequences, **arguments)
    agrees(flat, step.loss(flat, "sequence", gspo, clip_range_growth=0.0, noise=0.0, scale=1.0), expected, "GSPO")
    agrees(flat, objective_loss(gspo, gspo.settings.Objective.gspo(), step, flat, sigma=1.0), expected, "Objective.gspo()")


def token_ratios_make_it_grpo(gspo: Gspo, step: Step) -> None:
    step = step.stretched(200.0)
    flat = replace(pack(step.sequences, F64), weights_S=torch.ones(len(step.sequences), dtype=F64))
    expected = reference_grpo(step.sequences, num_sequences=step.num_sequences, eps_low=0.2, eps_high=0.27)
    objective = gspo.settings.Objective.grpo()
    agrees(flat, objective_loss(gspo, objective, step, flat, sigma=1.0), expected, "GRPO", 1e-9)


def fresh_tokens_have_the_papers_clip(gspo: Gspo, step: Step) -> None:
    """At lag 0 and without noise, a clip range that grows with both is the paper's, with either anchor."""
    fresh = step.with_paper_advantages()
    fresh = fresh.with_sequences([replace(s, lag=0.0) for s in fresh.sequences])
    expected = reference_gspo(fresh.sequences, num_sequences=step.num_sequences, eps_low=EPS_LOW, eps_high=EPS_HIGH)
    flat = pack(fresh.sequences, F64)
    behaviour = gspo.settings.Objective(anchor="behaviour", tis_mode="off", clip_range_growth=1.0, noise_z=1.0)
    agrees(flat, objective_loss(gspo, behaviour, fresh, flat, sigma=0.0), expected, "behaviour anchor")
    proximal = gspo.settings.Objective(anchor="proximal", tis_mode="off")
    output = objective_loss(gspo, proximal, fresh, flat, sigma=0.0, proximal_logprobs_T=flat.anchor_T)
    agrees(flat, output, expected, "proximal anchor")


def at_ratio_one_it_is_the_policy_gradient(gspo: Gspo, step: Step) -> None:
    """The gradient is -1/N sum_i 1/n_i sum_t A_t grad log pi(y_t)."""
    same = step.with_sequences([replace(s, logprobs=s.anchor_logprobs, weight=1.0) for s in step.sequences])
    for unit in UNITS:
        flat = pack(same.sequences, F64)
        expected = [
            -a * m / max(sum(s.mask), 1) / step.num_sequences
            for s in same.sequences
            for a, m in zip(s.advantages, s.mask, strict=True)
        ]
        gradient_T = flat.gradient(step.loss(flat, unit, gspo))
        all_close(gradient_T, torch.tensor(expected, dtype=F64), 1e-15, f"policy gradient, unit {unit}")


def the_gradient_is_the_derivative_of_the_value(gspo: Gspo, step: Step) -> None:
    """Central differences agree where every unit has one advantage: there s_u is differentiable."""
    by_sequence, h = step.with_paper_advantages(), 1e-7
    if distance_to_a_bound(step) < 4 * h:
        return
    for unit in UNITS:
        sequences = step.sequences if unit == "token" else by_sequence.sequences
        if unit == "turn":
            sequences = [replace(s, advantages=[math.cos(3.0 * k) for k in s.turns]) for s in sequences]
        flat = pack(sequences, F64)
        gradient_T = flat.gradient(step.loss(flat, unit, gspo))
        for t in range(0, gradient_T.shape[0], 3):
            values = []
            for sign in (1, -1):
                moved_T = flat.logprobs_T.detach().clone()
                moved_T[t] += sign * h
                values.append(step.loss(replace(flat, logprobs_T=moved_T), unit, gspo).loss.item())
            slope = (values[0] - values[1]) / (2 * h)
            assert abs(slope - gradient_T[t].item()) < 1e-7, f"unit {unit}, token {t}: {gradient_T[t]} is not {slope}"


def only_the_policys_log_probs_carry_a_gradient(gspo: Gspo, step: Step) -> None:
    flat = pack(step.sequences, F64)
    for tensor in (flat.anchor_T, flat.advantages_T, flat.weights_S):
        tensor.requires_grad_()
    others = [flat.anchor_T, flat.advantages_T, flat.weights_S]
    for unit in UNITS:
        gradients = torch.autograd.grad(step.loss(flat, unit, gspo).loss, others, allow_unused=True)
        assert all(g is None for g in gradients), f"unit {unit}: {gradients}"
    proximal_T = proximal_of(step, flat).requires_grad_()
    objective = gspo.settings.Objective(anchor="proximal", tis_mode="truncate")
    output = objective_loss(gspo, objective, step, flat, sigma=0.0, proximal_logprobs_T=proximal_T)
    gradients = torch.autograd.grad(output.loss, [*others, proximal_T], allow_unused=True)
    assert all(g is None for g in gradients), f"proximal anchor: {gradients}"


def objective_loss(gspo: Gspo, objective: object, step: Step, flat: Flat, *, sigma: float, **optional: object) -> LossOutput:
    output: LossOutput = gspo.loss.objective_loss(
        objective,
        flat.logprobs_T,
        flat.anchor_T,
        flat.advantages_T,
        flat.mask_T,
        flat.sequence_ids_T,
        flat.turn_ids_T,
        lag_S=flat.lag_S,
        sigma=sigma,
        num_sequences=step.num_sequences,
        **optional,
    )
    return output


def proximal_of(step: Step, flat: Flat) -> Tensor:
    values = [x for row, s in zip(step.proximal, step.sequences, strict=True) for x in row[: len(s.mask)]]
    return torch.tensor(values, dtype=flat.logprobs_T.dtype)
