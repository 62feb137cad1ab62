"""Question k of the study: its arms are settings that a run takes, and its rule says what was fixed beforehand."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study.real_model import (
    ARMS,
    BFLOAT16,
    DEFAULT,
    MASTERS,
    MIDDLE,
    SEEDS,
    SPREAD,
    Outcome,
    beside_float32,
    is_ahead,
    keep,
    kept,
    masters_table,
    masters_verdict,
    outcome,
    table,
    verdicts,
)
from benchmarks.study.reporting.plots import draw_all
from benchmarks.study.results import Results
from gspo_services.runs.metrics import HeldOut, RunMetrics
from gspo_services.shared.settings import load_settings

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2.toml"


def outcomes(**scores: tuple[float, float, float]) -> list[Outcome]:
    """One outcome per arm and seed; arms without scores get 0.4."""
    return [
        Outcome(arm, seed, 0.1, [scores.get(arm, (0.4, 0.4, 0.4))[seed]] * 5, 0.2, 0.03, 2.0)
        for arm in ARMS
        for seed in SEEDS
    ]


def masters(spread: float, middle: float = 0.1) -> list[Outcome]:
    """One outcome per arm of question l and seed."""
    found = {SPREAD: spread, MIDDLE: middle}
    return [
        Outcome(arm, seed, 0.1, [value + 0.01 * seed] * 5, 0.2, 0.03, 2.0) for arm, value in found.items() for seed in SEEDS
    ]


def test_the_arms_of_question_l_differ_in_the_masters_alone() -> None:
    spread, middle = (load_settings(EXAMPLE, overrides=[*BFLOAT16, *settings]) for settings in MASTERS.values())
    assert (spread.learner.spread_masters, middle.learner.spread_masters) == ("evenly", False)
    assert spread.learner.dtype == middle.learner.dtype == spread.model.dtype == "bfloat16"


def test_the_verdict_on_masters_follows_the_rule() -> None:
    said = {masters_verdict(masters(spread)).split(": ")[1] for spread in (0.3, 0.1, 0.05)}
    assert said == {"shown.", "refuted."}
    uneven = [*masters(0.3)[:2], Outcome(SPREAD, 2, 0.1, [0.05] * 5, 0.2, 0.03, 2.0), *masters(0.3)[3:]]
    assert masters_verdict(uneven) == "Spread masters learn faster: open."
    assert masters_verdict(masters(0.3)[1:]) == "1 runs are missing: no verdict."
    text = masters_table(masters(0.3), outcomes(calibrated=(0.31, 0.32, 0.33)))
    assert "| spread | 0.300, 0.310, 0.320 | 0.200 ± 0.000 |" in text
    assert "| float32 | 0.310, 0.320, 0.330 | 0.210 ± 0.000 |" in text


def test_every_arm_is_a_run_of_the_example_and_differs_in_the_objective_alone() -> None:
    plain = load_settings(EXAMPLE)
    for arm, settings in ARMS.items():
        objective = load_settings(EXAMPLE, overrides=list(settings)).objective
        assert (objective == plain.objective) == (arm == DEFAULT)
    constant = load_settings(EXAMPLE, overrides=list(ARMS["constant"])).objective
    assert (constant.eps_low, constant.eps_high, constant.clip_range_growth, constant.noise_z) == (0.033, 0.034, 0, 0)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, ("not refuted", "refuted", "shown")),
        ({"fixed": (0.1, 0.11, 0.12)}, ("not refuted", "shown", "shown")),
        ({"fixed": (0.1, 0.11, 0.41)}, ("not refuted", "open", "shown")),
        ({"c = 1": (0.5, 0.51, 0.49)}, ("refuted by c = 1", "refuted", "shown")),
        ({"constant": (0.5, 0.51, 0.49)}, ("refuted by constant", "refuted", "refuted")),
        ({"constant": (0.3, 0.31, 0.29)}, ("not refuted", "refuted", "refuted")),
        ({"constant": (0.6, 0.5, 0.38)}, ("not refuted", "refuted", "open")),
    ],
)
def test_the_verdicts_follow_the_rule(scores: dict[str, tuple[float, float, float]], expected: tuple[str, str, str]) -> None:
    said = verdicts(outcomes(**scores))
    assert tuple(line.rsplit(": ", 1)[1].rstrip(".") for line in said) == expected


def test_ahead_needs_every_seed_and_an_interval_above_nothing() -> None:
    assert is_ahead(outcomes(constant=(0.5, 0.51, 0.49)), "constant", DEFAULT)
    assert not is_ahead(outcomes(constant=(0.41, 0.9, 0.45)), "constant", DEFAULT)  # wide
    assert not is_ahead(outcomes(constant=(0.5, 0.51, 0.4)), "constant", DEFAULT)  # even in one seed
    assert not is_ahead(outcomes(constant=(0.5, 0.51, 0.49))[:-4], "constant", DEFAULT)  # a seed is missing


def test_the_curves_of_all_arms_are_drawn(tmp_path: Path) -> None:
    drawn = draw_all(Results({}, []), [], tmp_path, outcomes(), beside_float32(masters(0.2), outcomes()))
    assert [path.name for path in drawn] == ["real_model.png", "masters.png"]


def test_without_every_run_there_is_no_verdict() -> None:
    assert verdicts(outcomes()[:-1]) == ["1 runs are missing: no verdict."]
    assert "| calibrated | 0.400, 0.400, 0.400 | - |" in table(outcomes()[:-1])


def test_a_run_that_ended_early_is_no_outcome(tmp_path: Path) -> None:
    batch = {"clip_fraction/all": 0.2, "clip_range_high/all": 0.03, "lag/all": 2.0}
    held_out = [
        HeldOut(
            policy_version=4 * index, batch=4 * index, reward=0.1 * index, num_finished=64, num_failed=0, time_s=0.0,
            score=0.1 * index,
        )
        for index in range(6)
    ]  # fmt: skip
    metrics = RunMetrics(
        path=tmp_path / "metrics.jsonl", batches=[batch] * 20, evaluations=held_out, sets=[], events=[], damage=()
    )
    whole = outcome("fixed", 1, metrics)
    assert (whole.start, whole.rewards, whole.mean_lag) == (0.0, [0.1 * index for index in range(1, 6)], 2.0)
    with pytest.raises(ValueError, match="fixed, seed 1: 19 batches and 6 evaluations"):
        outcome("fixed", 1, replace(metrics, batches=metrics.batches[1:]))
    keep(tmp_path / "kept.jsonl", [whole])
    assert kept(tmp_path / "kept.jsonl") == [whole]
    assert kept(tmp_path / "none.jsonl") == []
