"""Question m: its arms are the product's rules, tuning ends inside its grid, and its rule is applied as it was fixed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.study import lag_margin
from benchmarks.study.clip_forms import study_clip_range, study_terms, tempering
from benchmarks.study.config import RunConfig
from benchmarks.study.questions import lag as module
from benchmarks.study.questions.grid import Cell, runs
from benchmarks.study.questions.lag import (
    ARMS,
    CALIBRATED,
    CONSTANT,
    LAGS,
    LENGTHS,
    NEVER,
    RATES,
    SEEDS,
    TUNING_SEEDS,
    Tuning,
    comparison,
    place_of,
    shipped_config,
    tuned_config,
    tuning_runs,
)  # fmt: skip
from benchmarks.study.reporting import lag as reporting
from benchmarks.study.reporting.lag import is_inside, margin, missed_its_aim, missing, next_tuning, verdict
from benchmarks.study.reporting.summary import RunSummary, summarise_run
from benchmarks.study.results import Results, load_summaries
from benchmarks.study.run_record import RunRecord
from gspo.calibration import Calibration
from gspo.loss import gspo_loss, objective_loss
from gspo.options.surrogates import m2po_clip, vespo
from gspo.settings import Objective

F64 = torch.float64
NOTHING = Tuning({}, {})
MIDDLE = {arm: (2e-4, sorted(rule.multiples)[len(rule.multiples) // 2]) for arm, rule in ARMS.items()}
TUNED = Tuning({place_of(length, arm): setting for length in LENGTHS for arm, setting in MIDDLE.items()}, {})
DRIFT = Calibration(*torch.tensor([[0.0, -0.1, -0.2], [0.0, 0.01, 0.04], [0.0, 0.5, 1.0]], dtype=F64))


def summary_of(config: RunConfig, reward: float, *, start: float = 0.1) -> RunSummary:
    rows = [{"batch": 4.0 * index, "eval": reward if index else start} for index in range(13)]
    return summarise_run(RunRecord(config.run_id, config.as_dict(), rows))


@dataclass(frozen=True)
class Named:
    """What ``Results`` reads of a configuration."""

    run_id: str
    seed: int


def results_of(reward: Callable[[str, str, str, int, int], float], tuning: Tuning = TUNED) -> Results:
    """Question m with the reward of each length, arm, column, lag and seed; no two cells share a run, as at lag 0."""
    cells, found = [], {}
    for row, place, config in comparison(tuning):
        (length, arm), (column, lag) = row.split("/"), place.split(", lag ")
        run_id = f"{row}, {place}, {config.seed}"
        cells.append(Cell("m", row, place, Named(run_id, config.seed)))  # type: ignore[arg-type]
        found[run_id] = summary_of(config, reward(length, arm, column, int(lag), config.seed))
    return Results(found, cells)


def test_no_start_model_of_the_question_was_used_before_and_tuning_has_its_own() -> None:
    tuning, compared = ({config.seed for _, _, config in found} for found in (tuning_runs(NOTHING), comparison(TUNED)))
    assert (tuning, compared) == (set(TUNING_SEEDS), set(SEEDS))
    earlier = ["d-short", "d-long", "f-tune", "f", "i-tune", "i", "g", "j"]
    assert not (tuning | compared) & {config.start_number for config in runs(earlier)}
    assert len({config.run_id for _, _, config in comparison(TUNED)}) > 9 * 6 * 3 * 4
    assert len(comparison(NOTHING)) * 2 == len(comparison(TUNED)), "shipped runs wait for nothing"


def test_every_question_run_before_keeps_its_id() -> None:
    """New fields have defaults that ids leave out."""
    kept = load_summaries()
    assert [run_id for run_id, run in kept.items() if RunConfig(**run.config).run_id != run_id] == []
    assert len(kept) > 1000


def test_shipped_arms_are_the_products_defaults_and_the_authors_values() -> None:
    shipped = {arm: shipped_config("long", arm, SEEDS[0], 8) for arm in ARMS}
    default = Objective()
    calibrated = shipped[CALIBRATED]
    assert (calibrated.eps_low, calibrated.eps_high, calibrated.noise_z, calibrated.clip_cap) == (
        default.eps_low, default.eps_high, default.noise_z, default.clip_calibration_cap,
    )  # fmt: skip
    theirs = Objective.m2po_clip()
    own = shipped["M2PO"]
    assert (own.eps_low, own.eps_high, own.m2po_bound) == (theirs.eps_low, theirs.eps_high, theirs.m2po_bound)
    assert shipped["VESPO"].aggregation == own.aggregation == "length"
    tuned = [tuned_config("long", arm, SEEDS[0], 8, (1e-4, 1.0)) for arm in ARMS]
    assert {config.aggregation for config in tuned} == {"sequence"}, "rules alone differ"


@pytest.mark.parametrize("arm", ["VESPO", "M2PO"])
def test_the_rivals_terms_are_the_products(arm: str) -> None:
    drawn = torch.Generator().manual_seed(0)
    old_T = -torch.rand(40, generator=drawn, dtype=F64)
    new_T = old_T + 0.3 * torch.randn(40, generator=drawn, dtype=F64)
    ids_T = torch.arange(4).repeat_interleave(10)
    advantages_T = torch.randn(4, generator=drawn, dtype=F64)[ids_T]
    mask_T, lag_S, tokens_S = torch.ones(40, dtype=torch.bool), torch.zeros(4, dtype=F64), torch.full((4,), 10.0)
    config = tuned_config("long", arm, 0, 8, (2e-4, 1.0))
    clip = study_clip_range(config, lag_S, tokens_S, sigma=0.0, scale=1.0, calibration=DRIFT, generator=torch.Generator())
    ours = gspo_loss(
        new_T, old_T, advantages_T, mask_T, ids_T, num_sequences=4, clip_range=clip, ratio_unit="token",
        surrogate=study_terms(config, lag_S, tokens_S, DRIFT), log_ratio_clamp=20.0,
    )  # fmt: skip
    objective = replace({"VESPO": Objective.vespo(), "M2PO": Objective.m2po_clip()}[arm], aggregation="sequence")
    theirs = objective_loss(objective, new_T, old_T, advantages_T, mask_T, ids_T, num_sequences=4, lag_S=lag_S)
    assert ours.loss.item() == theirs.loss.item() != 0


def test_tempering_leaves_drift_and_noise_half_of_the_sample_and_does_nothing_without_them() -> None:
    lag_S, tokens_S = torch.tensor([0.0, 2.0, 2.0]), torch.tensor([50.0, 2.0, 50.0])
    power_S = tempering(DRIFT, lag_S, tokens_S)
    assert power_S.tolist() == [1.0, pytest.approx(math.sqrt(math.log(2)) / (2 * math.sqrt(0.04 + 0.5))), power_S[2]]
    deviation = 50 * math.sqrt(0.04 + 1 / 50)
    log_w_N = deviation * torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=F64)
    weights_N = (power_S[2] * log_w_N).exp()
    assert float(weights_N.sum() ** 2 / weights_N.square().sum() / len(weights_N)) == pytest.approx(0.5, abs=0.01)
    terms = study_terms(shipped_config("long", "tempered", 0, 8), lag_S, tokens_S, DRIFT)
    assert terms is not None
    assert study_terms(shipped_config("long", CALIBRATED, 0, 8), lag_S, tokens_S, DRIFT) is None
    assert study_terms(shipped_config("long", "VESPO", 0, 8), lag_S, tokens_S, DRIFT) is vespo
    own = study_terms(shipped_config("long", "M2PO", 0, 8), lag_S, tokens_S, DRIFT)
    assert isinstance(own, partial)
    assert (own.func, own.keywords) == (m2po_clip, {"bound": 0.04})


def test_a_width_in_nats_is_that_of_the_whole_answer_whatever_its_length() -> None:
    config, tokens_S = shipped_config("mixed", "in nats", 0, 8), torch.tensor([6.0, 120.0])
    clip = study_clip_range(
        config, torch.zeros(2), tokens_S, sigma=1.0, scale=1.0, calibration=DRIFT, generator=torch.Generator()
    )
    low_S, high_S = clip.bounds(torch.arange(2), tokens_S)
    assert (low_S * tokens_S).tolist() == pytest.approx([-0.3, -0.3])
    assert (high_S * tokens_S).tolist() == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize(
    "wrong", [{"ratio_unit": "sequence"}, {"clip": "range"}, {"anchor": "proximal"}, {"surrogate": "m2po_clip"}]
)
def test_a_surrogate_with_what_it_has_no_use_for_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"surrogate is .* give token, behaviour, and (none|range)"):
        replace(shipped_config("long", "VESPO", 0, 8), **wrong)  # type: ignore[arg-type]


def tuning_results(reward: Callable[[str, float, float], float], tuning: Tuning) -> Results:
    cells = [Cell("m-tune", *each) for each in tuning_runs(tuning)]
    found = {}
    for cell in cells:
        arm, (rate, width) = cell.row.partition("/")[2], cell.column.removeprefix("lr ").split(", width x ")
        found[cell.config.run_id] = summary_of(cell.config, reward(arm, float(rate), float(width)))
    return Results(found, cells)


def test_tuning_goes_beyond_an_edge_twice_at_most_and_says_where_it_ended_at_one() -> None:
    def reward(arm: str, rate: float, width: float) -> float:
        best = {CALIBRATED: (2e-4, 10.0), "VESPO": (1.6e-3, 1.0), NEVER: (5e-5, 1.0), CONSTANT: (2e-4, 90.0)}
        rate_best, width_best = best.get(arm, (2e-4, sorted(ARMS[arm].multiples)[len(ARMS[arm].multiples) // 2]))
        return 0.9 - 0.1 * abs(math.log2(rate / rate_best)) - 0.1 * abs(math.log(width / width_best))

    tuning, asked = NOTHING, []
    while len(tuning.chosen) < len(LENGTHS) * len(ARMS):
        asked.append(len(tuning_runs(tuning)))
        tuning = next_tuning(tuning_results(reward, tuning), tuning)
    assert asked == [378, 396, 414]
    assert tuning.chosen["long/calibrated"] == (2e-4, 10.0)
    assert tuning.chosen["short/never clipping"] == (5e-5, 1.0)
    assert tuning.chosen["mixed/constant"] == (2e-4, 90.0)
    assert is_inside("mixed", CONSTANT, tuning)
    assert tuning.chosen["short/VESPO"] == (pytest.approx(1.6e-3), 1.0)
    assert not is_inside("short", "VESPO", tuning)
    assert is_inside("short", NEVER, tuning)


def test_tuning_waits_for_its_runs_and_is_kept_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"m-tune: short, calibrated, lr 0.0001, width x 1 has 0 of 2 runs"):
        next_tuning(Results({}, []), NOTHING)
    TUNED.write(tmp_path / "tuned.json")
    assert Tuning.read(tmp_path / "tuned.json") == TUNED
    assert Tuning.read(tmp_path / "none.json") == NOTHING


def falling(drops: dict[tuple[str, str], int]) -> Callable[[str, str, str, int, int], float]:
    """A reward of 0.5 up to the last good lag of an arm and column (32 for those that are not named), and then of 0.4."""

    def reward(length: str, arm: str, column: str, lag: int, seed: int) -> float:
        return 0.5 - 0.001 * (seed % 2) * (lag > 0) - 0.1 * (lag > drops.get((arm, column), 32))

    return reward


def test_a_margin_is_the_last_lag_before_the_first_that_is_not_near_the_ceiling() -> None:
    results = results_of(falling({("VESPO", "tuned"): 4, ("M2PO", "tuned"): 0, (NEVER, "tuned"): -1}))
    margins = [margin(results, "long", arm, "tuned", SEEDS[0]) for arm in (CONSTANT, "VESPO", "M2PO", NEVER)]
    assert margins == [5.0, 2.0, 0.0, 0.0]
    # Near again further on counts for nothing.
    gap = results_of(lambda length, arm, column, lag, seed: 0.5 - 0.1 * (lag == 8 and arm == CONSTANT))
    assert margin(gap, "long", CONSTANT, "tuned", SEEDS[0]) == 2.0
    within = results_of(lambda length, arm, column, lag, seed: 0.5 - 0.019 * (lag > 0))
    assert margin(within, "short", CONSTANT, "tuned", SEEDS[0]) == 5.0


def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "is_inside", lambda length, arm, tuning: (length, arm) != ("mixed", "VESPO"))


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ({}, ("shown", "shown", "shown")),
        ({(CALIBRATED, "shipped"): 8}, ("shown", "refuted", "shown")),
        ({(CONSTANT, "tuned"): 8}, ("shown", "shown", "refuted")),
        ({(CONSTANT, "tuned"): 0}, ("refuted", "shown", "refuted")),
    ],
)
def test_the_rule_is_applied_to_whole_seeds(
    drops: dict[tuple[str, str], int], expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(monkeypatch)
    assert verdict(results_of(falling(drops)), "long", TUNED) == expected


def test_uneven_seeds_leave_it_open_and_an_arm_at_an_edge_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch)

    def uneven(length: str, arm: str, column: str, lag: int, seed: int) -> float:
        if column == "shipped" or seed != SEEDS[0] or arm != CONSTANT:
            return 0.5
        return 0.5 - 0.1 * (lag > 2) - 0.05 * (lag == 2)

    assert verdict(results_of(uneven), "long", TUNED) == ("open", "shown", "open")
    only_vespo = results_of(falling({(arm, "tuned"): 8 for arm in ARMS if arm != "VESPO"}))
    assert verdict(only_vespo, "long", TUNED).tuned == "refuted"
    assert verdict(only_vespo, "mixed", TUNED).tuned == "shown", "VESPO's best was at an edge"
    monkeypatch.setattr(reporting, "is_inside", lambda length, arm, tuning: arm != CONSTANT)
    assert set(verdict(only_vespo, "long", TUNED)) == {"open"}


def test_there_is_no_verdict_before_four_whole_seeds() -> None:
    half = results_of(falling({}), NOTHING)
    assert missing(half, "short") == len(ARMS) * len(LAGS) * len(SEEDS)
    with pytest.raises(ValueError, match="short: 216 runs are missing, and the rule asks for four whole seeds"):
        verdict(half, "short", NOTHING)
    assert "Long answers: 216 runs are missing." in reporting.comparison(half)
    table = reporting.comparison(results_of(falling({("VESPO", "tuned"): 4})))
    assert "| VESPO | 5.00 | +0.000 ± 0.000 | 0.50 0.50" in table
    assert "| 2.00 | **-3.000 ± 0.000** | 0.50 0.50 0.50 0.40 0.40 0.40 |" in table


def test_a_length_at_which_nothing_needs_a_rule_has_missed_its_aim() -> None:
    assert missed_its_aim(results_of(falling({})), "short"), "never clipping lags as far"
    assert not missed_its_aim(results_of(falling({(NEVER, "tuned"): 2})), "short")
    nothing = results_of(lambda length, arm, column, lag, seed: 0.05 + 0.1 * (arm == NEVER and lag > 0))
    assert missed_its_aim(nothing, "long")


def test_one_command_makes_the_parts_in_order_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[list[RunConfig]] = []
    finished: dict[str, RunSummary] = {}

    def make(directory: Path, wanted: list[RunConfig], jobs: int) -> int:
        made.append(wanted)
        finished.update({config.run_id: summary_of(config, 0.9 - abs(config.learning_rate - 2e-4)) for config in wanted})
        return 0

    monkeypatch.setattr(lag_margin, "make", make)
    monkeypatch.setattr(lag_margin, "condensed_runs", lambda: set(finished))
    monkeypatch.setattr(lag_margin, "all_summaries", lambda directory, wanted: finished)
    monkeypatch.setattr(lag_margin, "condense_records", lambda directory: 0)
    asked = ["--directory", str(tmp_path), "--lengths", "short"]
    path = tmp_path / "tuned.json"
    assert lag_margin.main([*asked, "--dry-run"], tuned_file=path) == 0
    assert "short, m-tune: 126 runs missing" in capsys.readouterr().out
    assert made == []
    assert lag_margin.main([*asked, "--seeds", "510"], tuned_file=path) == 0
    assert {config.seed for config in made[0]} == set(TUNING_SEEDS)
    assert {config.seed for config in made[-1]} == {510}
    assert {config.task for wanted in made for config in wanted} == {"arithmetic"}
    assert set(Tuning.read(path).chosen) == {f"short/{arm}" for arm in ARMS}
    assert 53 < len(made[-1]) < 108, "shipped and tuned, of which some are one run"
    made.clear()
    assert lag_margin.main([*asked, "--seeds", "510"], tuned_file=path) == 0
    assert made == [[]], "nothing is made twice"
    assert RATES[1] == module.USUAL_RATE
