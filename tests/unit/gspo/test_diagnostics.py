"""Per-sequence statistics: merging over micro-batches, lag buckets, and what a summary contains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gspo.diagnostics import LAG_BUCKETS, NEGATIVE, POSITIVE, SequenceStats, effective_sample_size, summarise
from tests.support.loss.loss_cases import one_sequence, pack, random_sequence


def random_stats(generator: torch.Generator, lags: list[float]) -> SequenceStats:
    return pack([random_sequence(generator, [True] * 5, lag=lag) for lag in lags]).loss(1000, clip_range_growth=0.5).stats


def test_micro_batches_and_ranks_merge_into_the_summary_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [random_sequence(generator, [True] * (1 + i % 7), lag=float(i % 6)) for i in range(60)]
    whole = summarise(pack(sequences).loss(60).stats)
    parts = [pack(sequences[a:b]).loss(60).stats for a, b in ((0, 1), (1, 35), (35, 60))]
    gathered = [SequenceStats.from_matrix(part.as_matrix()) for part in parts]
    merged = summarise(SequenceStats.merge(gathered))
    assert merged == pytest.approx(whole, rel=1e-6)
    quantiles = [summarise(part)["ratio_p99/all"] for part in parts]
    assert merged["ratio_p99/all"] != pytest.approx(float(np.mean(quantiles)), rel=1e-6)


def test_the_standard_error_says_how_far_noise_of_tokens_moves_the_log_ratios_of_sequences() -> None:
    """Rounding in bfloat16 is such noise: 0.02 nats a token move a sequence of 64 tokens out of the paper's clip range."""
    generator = torch.Generator().manual_seed(0)
    deltas = 0.02 * torch.randn(200, 64, generator=generator, dtype=torch.float64)
    drifted = pack([one_sequence((1e-3 + row).tolist(), 1.0) for row in deltas])
    stats = drifted.loss(200).stats
    reported = summarise(stats)["log_ratio_error/all"]
    assert reported == pytest.approx(0.02 / 8, rel=0.02)
    assert float(stats.log_ratio_S.std()) == pytest.approx(reported, rel=0.15)
    assert stats.log_ratio_error_S[0].item() == pytest.approx(float(deltas[0].std(correction=0)) / 8, rel=1e-5)
    moved_alike = pack([one_sequence([1e-3] * 64, 1.0), one_sequence([1e-3], 1.0)]).loss(2).stats
    assert moved_alike.log_ratio_error_S.tolist() == [pytest.approx(0.0, abs=1e-9)] * 2


def test_ratio_quantiles_and_clip_fractions_are_over_sequences() -> None:
    logs = [0.001 * k for k in range(-50, 51)]
    flat = pack([one_sequence([x] * 3, 1.0 if x > 0 else -1.0) for x in logs], torch.float64)
    summary = summarise(flat.loss(101).stats)
    assert summary["ratio_p50/all"] == pytest.approx(1.0)
    assert summary["ratio_p99/all"] == pytest.approx(math.exp(0.049))
    assert summary["ratio_min/all"] == pytest.approx(math.exp(-0.05))
    assert summary["clip_fraction_high/all"] == pytest.approx(50 / 101)
    assert summary["clip_fraction/all"] == pytest.approx(100 / 101)


def test_lags_fall_into_a_closed_set_of_buckets_rounded_up() -> None:
    lags = [0.0, 0.25, 1.0, 1.5, 2.0, 2.5, 4.0, 4.01, 90.0]
    summary = summarise(random_stats(torch.Generator().manual_seed(1), lags))
    counts = [summary[f"sequences/{name}"] for name, _ in LAG_BUCKETS]
    assert counts == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert summary["sequences/all"] == 9.0
    assert summary["lag/lag_3_4"] == pytest.approx(3.25)


def test_the_signs_of_the_advantage_have_buckets_of_their_own_and_zero_is_in_neither() -> None:
    flat = pack(
        [
            one_sequence([0.01] * 2, 1.0),
            one_sequence([-0.02] * 2, 2.0),
            one_sequence([-0.03] * 2, [-3.0, 1.0]),
            one_sequence([0.04] * 2, [1.0, -1.0]),
            one_sequence([], 0.0),
        ],
        torch.float64,
    )
    summary = summarise(flat.loss(5).stats)
    assert (summary["sequences/all"], summary["sequences/advantage_positive"]) == (4.0, 2.0)
    assert summary["sequences/advantage_negative"] == 1.0
    assert summary["clip_fraction/all"] == pytest.approx((1 + 0 + 0.5 + 0.5) / 4)
    assert summary["clip_fraction_high/advantage_positive"] == pytest.approx(0.5)
    assert summary["clip_fraction_low/advantage_negative"] == pytest.approx(0.5)
    assert summary["ratio_p50/advantage_negative"] == pytest.approx(math.exp(-0.03))
    assert (summary["advantage/advantage_positive"], summary["advantage/advantage_negative"]) == (1.5, -1.0)


def test_empty_sequences_are_counted_and_bias_nothing() -> None:
    flat = pack([one_sequence([], 0.0), one_sequence([0.01] * 2, 1.0), one_sequence([], 0.0, lag=7.0)])
    summary = summarise(flat.loss(3).stats)
    assert summary["sequences_empty/all"] == 2.0
    assert summary["sequences/all"] == 1.0
    assert summary["clip_fraction_high/all"] == 1.0
    assert summary["sequences/lag_5_up"] == 0.0


def test_what_was_not_measured_has_no_key_and_every_value_is_finite() -> None:
    stats = random_stats(torch.Generator().manual_seed(2), [0.0, 1.0])
    summary = summarise(stats)
    assert all(math.isfinite(value) for value in summary.values())
    assert not any(key.startswith(("mismatch_kl", "entropy", "groups", "zero_advantage_groups")) for key in summary)
    measured = summarise(replace(stats, mismatch_kl_S=torch.tensor([0.1, 0.3]), entropy_S=torch.tensor([2.0, 1.0])))
    assert measured["mismatch_kl/all"] == pytest.approx(0.2)
    assert measured["entropy/lag_1"] == pytest.approx(1.0)
    nothing = summarise(SequenceStats.merge([]))
    assert nothing == {"sequences_empty/all": 0.0} | {
        f"sequences/{name}": 0.0 for name in ("all", *(bucket for bucket, _ in LAG_BUCKETS), POSITIVE, NEGATIVE)
    }


def test_a_group_has_zero_advantage_when_all_its_members_in_all_micro_batches_have_advantage_zero() -> None:
    first = pack([one_sequence([0.0], 0.0), one_sequence([0.0], 0.0)]).loss(4).stats
    second = pack([one_sequence([0.0], 1.0), one_sequence([0.0], 0.0)]).loss(4).stats
    merged = SequenceStats.merge(
        [replace(first, group_S=torch.tensor([8, 9])), replace(second, group_S=torch.tensor([8, 9]))]
    )
    summary = summarise(merged)
    assert (summary["groups/all"], summary["zero_advantage_groups/all"]) == (2.0, 1.0)
    assert summary["zero_advantage_sequences/all"] == 3.0


def test_clamped_and_rejected_are_counted() -> None:
    flat = pack([one_sequence([30.0, 30.0], 1.0), one_sequence([0.0] * 5, 1.0, weight=0.0), one_sequence([0.0], 1.0)])
    summary = summarise(flat.loss(3).stats)
    assert (summary["clamped_tokens/all"], summary["rejected_sequences/all"]) == (2.0, 1.0)
    assert summary["mismatch_weight/all"] == pytest.approx(2 / 3)
    assert summary["zero_advantage_sequences/all"] == 0.0


def test_the_effective_sample_size_is_kishs_fraction() -> None:
    assert effective_sample_size(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 1.0, 0.0])) == pytest.approx(2 / 3)
    for unit in (1.0, 1e-200, 1e300):
        assert effective_sample_size(unit * torch.tensor([3.0, 1.0], dtype=torch.float64)) == pytest.approx(0.8)
    assert effective_sample_size(torch.zeros(3)) == effective_sample_size(torch.zeros(0)) == 0.0


def test_mismatch_weights_reduce_the_effective_sample_size() -> None:
    flat = pack([one_sequence([0.0], 1.0, weight=weight) for weight in (0.0, 1.0, 1.0, 0.0)])
    assert summarise(flat.loss(4).stats)["effective_sample_size/all"] == pytest.approx(0.5)


def test_a_matrix_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"matrix has shape \(2, 3\)"):
        SequenceStats.from_matrix(torch.zeros(2, 3))
