"""The comparisons and conclusions of the benchmarks of a training step and of the log-probs' memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.learner_step.__main__ import verdicts
from benchmarks.learner_step.batches import (
    GROUP_SIZE,
    PROMPT_TOKENS,
    groups_of_lengths,
    long_tailed_lengths,
    num_tokens,
    padded_micro_batches,
    padding_efficiency,
)
from benchmarks.learner_step.measure import Cost, speed_ratio, summary, take_turns
from benchmarks.learner_step.models import Shape, build, num_parameters
from benchmarks.learner_step.report import report_lines
from benchmarks.learner_step.steps import Bare, packed_micro_batches
from benchmarks.logprob_memory import MIB, expected_bytes, gradients_bytes, is_bounded, report

SHAPE = Shape("small", vocabulary=40, hidden=32, layers=1, heads=2, experts=4, expert_hidden=16)


@pytest.mark.parametrize("efficiency", [0.3, 0.6])
def test_lengths_have_the_efficiency_that_was_asked_for_and_a_long_tail(efficiency: float) -> None:
    lengths = long_tailed_lengths(64, 400, efficiency)
    assert lengths.max() == 400
    assert lengths.min() >= 1
    groups = groups_of_lengths(lengths, 40)
    assert padding_efficiency(groups) == pytest.approx(efficiency, abs=0.01)
    assert num_tokens(groups) == lengths.sum() + 64 * PROMPT_TOKENS
    assert np.median(lengths) <= lengths.mean()


def test_an_efficiency_that_prompts_alone_exceed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"efficiency is 0\.1"):
        long_tailed_lengths(8, 16, 0.1)


def test_both_layouts_hold_the_same_answers_log_probs_and_advantages() -> None:
    groups = groups_of_lengths(long_tailed_lengths(16, 30, 0.6), 40)
    advantages = torch.arange(16.0)
    parts = padded_micro_batches(groups, advantages, 4, pad=38)
    assert [part["completion_ids"].shape for part in parts] == [(4, 30)] * 4
    inside = torch.cat([part["completion_mask"] for part in parts]).bool()
    packed = packed_micro_batches(groups, 10_000)[0]
    assert torch.cat([part["completion_ids"] for part in parts])[inside].tolist() == packed.targets_T[packed.mask_T].tolist()
    old = torch.cat([part["old_per_token_logps"] for part in parts])
    assert torch.equal(old[inside], packed.behaviour_T[packed.mask_T])
    assert bool((torch.cat([part["completion_ids"] for part in parts])[~inside] == 38).all())
    assert torch.cat([part["advantages"] for part in parts]).tolist() == advantages.tolist()
    assert len(groups) * GROUP_SIZE == 16


def test_the_bare_step_is_the_gradient_of_the_mean_log_prob_of_all_packed_tokens() -> None:
    torch.set_num_threads(1)
    groups = groups_of_lengths(long_tailed_lengths(8, 30, 0.6), 40)
    bare = Bare(SHAPE, "float32", max_tokens_per_micro_batch=128)
    gradients = []
    name, parameter = next((n, p) for n, p in bare.model.named_parameters() if n.endswith("q_proj.weight"))
    parameter.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.clone()))
    bare.step(groups, with_adam=False)()
    parts = packed_micro_batches(groups, 128)
    assert len(gradients) == len(parts) > 1
    assert parameter.grad is None
    reference = build(SHAPE, "float32", attention="eager")
    members = [sequence for part in groups for sequence in part.sequences]
    total = torch.zeros(())
    for sequence in members:
        ids = torch.from_numpy(sequence.token_ids)
        logprobs = reference(ids[None]).logits[0].log_softmax(-1)
        # The last token of a packed sequence has target 0.
        total = total + logprobs.gather(-1, torch.cat([ids[1:], ids.new_zeros(1)])[:, None]).sum()
    (total / num_tokens(groups)).backward()
    torch.testing.assert_close(gradients[-1], reference.get_parameter(name).grad, rtol=1e-3, atol=1e-6)
    assert num_parameters(reference) == num_parameters(bare.model)


def test_a_ratio_is_of_one_round_and_says_how_many_times_as_many_tokens() -> None:
    ours, theirs = Cost([1.0, 2.0, 2.0], [1.0, 1.0, 1.0]), Cost([2.0, 2.0, 2.0], [3.0, 3.0, 3.0])
    assert speed_ratio(ours, theirs) == {"ratio": 1.0, "low": 1.0, "high": 1.5, "wall_ratio": 3.0}
    assert summary(ours, 100)["tokens_per_cpu_s"] == 50.0
    assert summary(ours, 100)["tokens_per_s"] == 100.0


def test_steps_take_turns_in_both_orders_and_the_first_round_is_not_counted() -> None:
    made: list[str] = []
    costs = take_turns({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, rounds=2)
    assert "".join(made) == "baabba"
    assert [len(cost.cpu_s) for cost in costs.values()] == [2, 2]


def test_a_limit_ends_the_rounds_early_but_one_is_counted() -> None:
    costs = take_turns({"a": lambda: None}, rounds=5, limit_s=0.0)
    assert len(costs["a"].cpu_s) == 1


def a_comparison(bare: float, trl: float) -> dict:
    cost = summary(Cost([1.0], [1.0]), 10)
    ratios = {
        name: {"ratio": value, "low": value, "high": value, "wall_ratio": value}
        for name, value in (("learner / bare", bare), ("learner / TRL", trl))
    }
    return {
        "model": "tiny",
        "dtype": "float32",
        "parameters": 1_500_000,
        "tokens": 10,
        "sequences": 8,
        "rounds": 1,
        "micro_batches": {"packed": 2, "TRL": 4},
        "padding_efficiency": 0.3,
        "steps": {"learner": cost},
        "ratios": ratios,
    }


def test_goals_are_met_or_missed_by_their_ratio_and_said_in_the_report() -> None:
    row = a_comparison(0.91, 1.99)
    goals = verdicts([row])
    assert [(goal["ratio"], goal["holds"]) for goal in goals] == [("learner / bare", True), ("learner / TRL", False)]
    grown = {"what": "layers", "value": 2, "parameters": 2e6, "ratio": {"ratio": 0.95}}
    grown |= {kind: summary(Cost([2.0], [2.0]), 10) for kind in ("learner", "bare")}
    figures = {"comparisons": [row], "growth": [grown], "goals": goals, "seconds": 3.2, "rounds": 1, "torch": "2"}
    lines = report_lines(figures)
    assert "| learner | 1.000 | 1.000 | 10 |" in lines
    assert "| learner / TRL | 1.990 (1.990 to 1.990) | 1.990 |" in lines
    assert "| layers | 2 | 2.00 | 5 | 5 | 0.950 |" in lines
    assert "tiny, float32: learner / TRL at least 2 is missed (1.990)" in lines


def test_what_memory_each_way_needs_follows_from_its_tensors() -> None:
    assert expected_bytes("log_softmax", 1024, 8192) == 3 * 32 * MIB
    # 512 rows of 32 KiB, twice, and the softmax of 32 MiB, which is kept.
    assert expected_bytes("chunks", 1024, 8192) == 2 * 16 * MIB + 32 * MIB
    assert expected_bytes("chunks", 4096, 8192) == expected_bytes("chunks", 8192, 8192) == 2 * 16 * MIB
    assert expected_bytes("chunks", 4096, 151_936) <= 2 * 256 * MIB
    assert gradients_bytes(1024, 1024) == 512 * 1024


def a_size(chunks_mib: float) -> dict:
    return {
        "vocabulary": 151_936,
        "tokens": 16_384,
        "gradients_bytes": 41 * MIB,
        "chunks": {"bytes": int(chunks_mib * MIB)},
        "log_softmax": None,
        "log_softmax_expected_bytes": 28_000 * MIB,
    }


def test_the_chunks_are_bounded_by_a_number_that_knows_neither_tokens_nor_vocabulary() -> None:
    assert is_bounded(a_size(41 + 832))
    assert not is_bounded(a_size(41 + 833))
    lines = report({"rows": [a_size(553)], "holds": True, "seconds": 1.0})
    assert "| 151,936 | 16,384 | 553 | 41 | (about 28,000) |  | 9,496 |" in lines
