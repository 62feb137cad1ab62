"""The study's harness: configurations, runs on disk, measurements, and the numbers in its tables."""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.study.__main__ import main
from benchmarks.study.clip_forms import study_clip_range
from benchmarks.study.config import RunConfig
from benchmarks.study.decoding import Answer
from benchmarks.study.learner import HALVES, DivergedError, Learner, length_weights
from benchmarks.study.measures import GradientNoise
from benchmarks.study.questions import settled
from benchmarks.study.questions.grid import CLIP_RANGES, Cell, cells, questions, runs
from benchmarks.study.reporting.report import ALL_TABLES, DOCUMENT, README, fill, one_below_the_other, tables_of
from benchmarks.study.reporting.summary import Interval, RunSummary, interval, summarise_run
from benchmarks.study.reporting.tables import FIXED, signed, staleness
from benchmarks.study.results import RESULTS, Results, condense_records, load_probes, load_summaries
from benchmarks.study.run import batches, execute
from benchmarks.study.run_record import RunRecord, condensed_runs, read_record, record_path
from benchmarks.study.sampler import Episode
from benchmarks.study.start_model import load_start_model
from benchmarks.study.tasks.countdown import Countdown, CountdownOptions, right_chain
from benchmarks.study.volatility import probe
from gspo.calibration import Calibration
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.moe.experts import ExpertPicks
from gspo_services.tasks.environments.generated import split_of

MICRO = RunConfig(
    task="arithmetic", seed=0, num_batches=2, num_sequences=16, group_size=2, num_mini_batches=2, num_eval_episodes=8, lag=1
)
START_STEPS = 6


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the start models of this module's runs."""
    return tmp_path_factory.mktemp("study")


def test_an_id_is_the_same_in_every_process_and_follows_from_what_differs_from_the_defaults() -> None:
    config = RunConfig(task="countdown", seed=0, num_batches=24)
    assert config.run_id == "countdown-993165753912"
    assert replace(config, eps_low=3e-4).run_id == config.run_id
    assert replace(config, eps_low=4e-4).run_id != config.run_id


def test_a_batch_that_cannot_be_split_into_whole_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of group_size x num_mini_batches = 32"):
        RunConfig(task="countdown", seed=0, num_batches=1, num_sequences=48)


def test_noise_without_a_deviation_is_refused() -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        RunConfig(task="countdown", seed=0, num_batches=1, noise="weights")


def test_without_lag_every_growth_of_the_clip_range_is_one_run() -> None:
    at_0 = [cell for cell in cells() if cell.question == "d-short" and cell.column == "0" and cell.config.seed == 0]
    assert len(at_0) == len(CLIP_RANGES)
    growing = {
        cell.config.run_id for cell in at_0 if "widened" in cell.row or "tightened" in cell.row or "fixed" in cell.row
    }
    assert len(growing) == 1
    assert len({config.run_id for config in runs()}) == len(runs()) < len(cells())


def test_an_unknown_question_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=f'no question "z": choose of {", ".join(questions())}'):
        runs(["z"])


def test_an_interrupt_ends_the_workers_with_their_jobs() -> None:
    waits = """
import os, signal
from benchmarks.study.__main__ import _workers
with _workers(1) as pool:
    pool.submit(os.getpid).result()
    jobs = [pool.submit(signal.pause) for _ in range(3)]
    print("they work", flush=True)
    jobs[-1].result()
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", waits], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"they work\n"
            os.killpg(process.pid, signal.SIGINT)
            _, error = process.communicate(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert b"KeyboardInterrupt" in error


def test_two_batches_are_the_same_numbers_every_time(studio: Path) -> None:
    first, second = ([_without_times(row) for row in batches(studio, MICRO, start_steps=START_STEPS)] for _ in range(2))
    assert first == second
    assert [row["batch"] for row in first] == [0, 1, 2]
    assert first[1]["lag"] == 1.0
    assert first[1]["tokens"] > first[0]["tokens"] > 0
    assert first[1]["reward"] == 0.0


def _trained(directory: Path, config: RunConfig, lengths: list[int]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Train one batch in which every second answer is right; return the record without times, and the weights after it."""
    model = load_start_model(directory / "start", config.task, 0, num_steps=START_STEPS)
    learner = Learner(model, config)
    ids = itertools.cycle(range(3, 60))
    episodes = [
        Episode([1, 2], Answer([next(ids) for _ in range(length)], [-5.0] * length), float(index % 2))
        for index, length in enumerate(lengths)
    ]
    sequences = [episode.train_sequence(0) for episode in episodes]
    record = learner.train(sequences, [episode.reward for episode in episodes], version=0, diagnose=True)
    return _without_times(record), learner.weights()


def test_training_is_the_same_to_the_last_bit_every_time(studio: Path) -> None:
    lengths = [1 + index % 5 for index in range(16)]
    (first, weights), (second, same) = (_trained(studio, MICRO, lengths) for _ in range(2))
    assert first == second
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert first["grad_norm"] > 0
    assert first["changed_1"] > 0


def test_the_engine_s_experts_are_replayed_at_sampled_tokens_in_every_pass(studio: Path) -> None:
    config = replace(MICRO, routing_replay=True, replay_from="engine", anchor="proximal")
    learner = Learner(load_start_model(studio / "start", config.task, 0, num_steps=START_STEPS), config)
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    plainly = learner.logprobs

    def watched(packed: PackedBatch, picks: ExpertPicks | None = None) -> TokenLogProbs:
        result = plainly(packed, picks)
        assert packed.experts_TLK is not None
        assert result.experts is not None
        seen.append((packed.mask_T, packed.experts_TLK, result.experts.indices_LTK.transpose(0, 1)))
        return result

    learner.logprobs = watched  # type: ignore[method-assign]
    chosen = np.tile(np.array([3, 5], dtype=np.int16), (2, 1))
    episodes = [Episode([1, 2], Answer([7, 9 + index], [-5.0] * 2, [chosen] * 2), float(index % 2)) for index in range(16)]
    learner.train(
        [each.train_sequence(0) for each in episodes], [each.reward for each in episodes], version=0, diagnose=False
    )
    assert len(seen) == 2 * HALVES * config.num_mini_batches, "one pass before the steps, and one in each"
    for mask_T, given_TLK, used_TLK in seen:
        assert used_TLK[mask_T].long().sort(dim=-1).values.equal(given_TLK[mask_T].long())
        assert not used_TLK[~mask_T].long().sort(dim=-1).values.eq(torch.tensor([3, 5])).all(), "others choose freely"
    with pytest.raises(ValueError, match="replay_from is 'engine' with routing_replay False"):
        replace(MICRO, replay_from="engine")


def test_length_weighting_is_nothing_for_equal_lengths_and_something_for_others(studio: Path) -> None:
    by_length = replace(MICRO, aggregation="length")
    equal, unequal = [3] * 16, [1 + index % 5 for index in range(16)]
    assert _trained(studio, MICRO, equal)[0] == _trained(studio, by_length, equal)[0]
    assert length_weights([1, 3]).tolist() == [0.5, 1.5]
    assert _trained(studio, MICRO, unequal)[0]["grad_norm"] != pytest.approx(
        _trained(studio, by_length, unequal)[0]["grad_norm"], rel=1e-3
    )


def test_a_gradient_that_is_not_finite_ends_the_run(studio: Path) -> None:
    model = load_start_model(studio / "start", "arithmetic", 0, num_steps=START_STEPS)
    next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    episode = Episode([1, 2], Answer([3, 4], [-5.0, -5.0]), 0.0)
    with pytest.raises(DivergedError, match="batch 0, mini-batch 0"):
        Learner(model, MICRO).train([episode.train_sequence(0)] * 16, [0.0, 1.0] * 8, version=0, diagnose=False)


def test_a_finished_run_is_skipped_and_its_record_kept(tmp_path: Path) -> None:
    config = replace(MICRO, num_batches=1)
    assert execute(tmp_path, config, start_steps=START_STEPS)
    path = record_path(tmp_path, config)
    written = path.read_bytes()
    assert not execute(tmp_path, config, start_steps=START_STEPS)
    assert path.read_bytes() == written
    record = read_record(path)
    assert record.run_id == config.run_id
    assert RunConfig(**record.config) == config
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_an_unfinished_record_counts_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = runs(["e"])
    directory = record_path(tmp_path, wanted[0]).parent
    directory.mkdir()
    record_path(tmp_path, wanted[0]).write_text("{}\n")
    (directory / f"{wanted[1].run_id}.123.unfinished").write_text("{}\n")
    assert main(["--directory", str(tmp_path), "--only", "e", "--again", "--dry-run"]) == 0
    assert f"{len(wanted)} runs, 1 finished, {len(wanted) - 1} to make" in capsys.readouterr().out


def test_a_run_whose_results_are_kept_with_the_code_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = runs(["e"])
    assert {config.run_id for config in wanted} <= condensed_runs()
    assert main(["--directory", str(tmp_path), "--only", "e", "--dry-run"]) == 0
    assert f"{len(wanted)} runs, {len(wanted)} finished, 0 to make" in capsys.readouterr().out


def test_condensing_keeps_the_results_of_runs_whose_records_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = load_summaries()
    (tmp_path / "runs.jsonl").write_text((RESULTS / "runs.jsonl").read_text())
    monkeypatch.setattr("benchmarks.study.results.RESULTS", tmp_path)
    assert condense_records(tmp_path / "records of nobody") == len(kept)
    assert load_summaries(tmp_path) == kept


def test_the_settling_question_tunes_on_start_models_that_it_does_not_compare() -> None:
    assert not set(settled.TUNING_SEEDS) & set(settled.SEEDS)
    assert len({config.seed % config.start_models for _, _, config in settled.tuning()}) == len(settled.TUNING_SEEDS)
    chosen = dict.fromkeys(settled.ARMS, (2e-4, 1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled, "CHOSEN", chosen)
        configs = [config for _, _, config in settled.comparison()]
    assert len({config.run_id for config in configs}) == len(settled.ARMS) * 27
    assert len({config.seed % config.start_models for config in configs}) == 27


def test_replayed_experts_do_not_change_and_are_not_counted(studio: Path) -> None:
    rows = list(batches(studio, replace(MICRO, num_batches=1), start_steps=START_STEPS))
    assert "changed_1" in rows[0]
    replayed = list(batches(studio, replace(MICRO, num_batches=1, routing_replay=True), start_steps=START_STEPS))
    assert "changed_1" not in replayed[0]
    assert replayed[0]["cpu_reference_s"] > 0


@pytest.mark.parametrize(("noise", "sigma"), [("bf16", 0.0), ("weights", 0.1), ("logprobs", 0.1)])
def test_a_noisy_sampler_is_measured_as_mismatch(studio: Path, noise: str, sigma: float) -> None:
    clean, noisy = (
        next(iter(batches(studio, replace(MICRO, lag=0, **values), start_steps=START_STEPS)))
        for values in ({}, {"noise": noise, "noise_sigma": sigma})
    )
    assert clean["mismatch_sigma"] < 1e-5
    assert noisy["mismatch_sigma"] > 1e-4


def test_a_probe_before_any_update_sees_precision_alone(studio: Path) -> None:
    config = replace(MICRO, lag=0, num_sequences=32, num_mini_batches=4)
    records = list(probe(studio, config, learning_rates=(1e-3,), start_steps=START_STEPS))
    assert [(record["updates"], record["reference"]) for record in records] == [
        (updates, reference) for updates in (0, 1, 4) for reference in ("float32", "bf16")
    ]
    exact, rounded = records[:2]
    assert (exact["changed"], exact["token_std_free"], exact["sequence_std_replayed"]) == (0.0, 0.0, 0.0)
    assert rounded["token_std_free"] > 1e-4
    assert rounded["sequence_std_free"] < rounded["token_std_free"]


DRIFT = Calibration(*torch.tensor([[0.0, -0.1, -0.2], [0.0, 0.01, 0.04], [0.0, 0.5, 1.0]], dtype=torch.float64))


def bounds_of(config: RunConfig, lag_S: torch.Tensor, num_tokens_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    clip = study_clip_range(
        config,
        lag_S,
        num_tokens_S,
        sigma=0.5,
        scale=1.0,
        calibration=DRIFT,
        generator=torch.Generator().manual_seed(0),
    )
    return clip.bounds(torch.arange(lag_S.shape[0]), num_tokens_S)


def test_the_controls_have_the_widths_of_the_calibrated_range_without_their_lags() -> None:
    lag_S, num_tokens_S = torch.tensor([0.0, 1.0, 2.0] * 8), torch.tensor([10.0, 20.0] * 12)
    config = replace(MICRO, noise_z=1.5)
    plain_low, plain_high = bounds_of(replace(config, noise_z=0.0), lag_S, num_tokens_S)
    margins = {
        form: bounds_of(replace(config, clip_form=form), lag_S, num_tokens_S)[1] - plain_high  # type: ignore[arg-type]
        for form in ("widen", "matched", "shuffled")
    }
    widened = margins["widen"]
    assert widened[0] == 0
    assert widened[5].item() == pytest.approx(1.5 * math.sqrt(0.04 + 1.0 / 20), rel=1e-5)
    torch.testing.assert_close(margins["matched"], widened.mean().expand_as(widened))
    assert not torch.equal(margins["shuffled"], widened)
    torch.testing.assert_close(margins["shuffled"].sort().values, widened.sort().values)
    low, high = bounds_of(replace(config, clip_form="recentre"), lag_S, num_tokens_S)
    torch.testing.assert_close(high, plain_high + widened - 0.1 * lag_S)
    torch.testing.assert_close(low, plain_low - widened - 0.1 * lag_S)


@pytest.mark.parametrize(
    "setting",
    [
        *({"clip_form": form, "noise_z": 1.0} for form in ("widen", "recentre", "matched", "shuffled")),
        {"anchor": "proximal", "mismatch_mode": "truncate_by_lag"},
    ],
    ids=str,
)
def test_every_form_trains_and_records_its_clipping_by_lag(studio: Path, setting: dict[str, Any]) -> None:
    config = replace(MICRO, num_batches=3, lag=2, lag_kind="uniform", **setting)
    rows = list(batches(studio, config, start_steps=START_STEPS))
    lags = {key for row in rows for key in row if key.startswith("clip_lag_")}
    assert lags <= {"clip_lag_0", "clip_lag_1", "clip_lag_2"}
    assert len(lags) > 1
    assert all(row["width_lag_0"] > 0 for row in rows if "width_lag_0" in row)


def test_a_calibrated_form_with_a_proximal_anchor_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_form is 'widen' with anchor 'proximal'"):
        replace(MICRO, clip_form="widen", anchor="proximal")


def test_without_clipping_nothing_is_outside_the_clip_range() -> None:
    config = replace(MICRO, clip="none")
    low_T, high_T = bounds_of(config, torch.tensor([0.0, 3.0]), torch.tensor([1.0, 7.0]))
    assert low_T.tolist() == [-math.inf, -math.inf]
    assert high_T.tolist() == [math.inf, math.inf]


def test_a_proximal_anchor_has_the_plain_clip_range_whatever_the_lag_and_the_noise() -> None:
    lag_S, tokens_S = torch.tensor([3.0]), torch.tensor([4.0])
    config = replace(MICRO, clip_range_growth=1.0, noise_z=1.0)
    plain = math.log1p(config.eps_high)
    assert bounds_of(config, lag_S, tokens_S)[1].item() == pytest.approx(4 * plain + 0.25)
    proximal = replace(config, anchor="proximal")
    assert bounds_of(proximal, lag_S, tokens_S)[1].item() == pytest.approx(plain)


def test_gradient_noise_of_two_halves_is_that_of_the_formula() -> None:
    noise = GradientNoise()
    noise.add(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0]), num_sequences=4)
    # g1 . g2 = 6; 4 * |(2, -2)|^2 / 2 = 16; cosine 6 / 10
    assert noise.record() == pytest.approx({"grad_signal_first": 6.0, "grad_trace_first": 16.0, "grad_cosine_first": 0.6})


def test_an_interval_is_students() -> None:
    # mean 2, s = 1, t(2) = 4.303: 4.303 / sqrt(3)
    mean, half_width, num = interval([1.0, 2.0, 3.0])
    assert (mean, num) == (2.0, 3)
    assert half_width == pytest.approx(2.4843, abs=1e-4)
    assert math.isnan(interval([1.0]).half_width)
    assert str(interval([0.5])) == "0.50"
    assert str(interval([])) == "-"


def _summary(rewards: list[float], *, diverged: bool = False) -> RunSummary:
    rows = [{"batch": 5.0 * index, "eval": reward, "clip": 0.25} for index, reward in enumerate(rewards)]
    if diverged:
        rows.append({"batch": 5.0 * len(rewards), "diverged": 1.0})
    return summarise_run(RunRecord("x", {"num_batches": 10, "eval_every": 5}, rows))


def test_a_run_in_numbers() -> None:
    summary = _summary([0.3, 0.9, 0.7])
    assert summary.area == pytest.approx(0.8)
    assert summary.final == pytest.approx(0.8)
    assert summary.batches_to_target == 5
    assert not summary.collapsed
    # Half of the reward missing at 0.3 is gained at 0.65.
    assert _summary([0.3, 0.64, 0.66]).batches_to_target == 10
    assert _summary([0.3, 0.64, 0.64]).batches_to_target is None


def test_a_collapse_is_an_end_below_half_of_the_best_or_below_the_start_or_no_end() -> None:
    assert _summary([0.3, 0.9, 0.4, 0.4]).collapsed
    assert _summary([0.5, 0.6, 0.4, 0.4]).collapsed
    assert _summary([0.3, 0.9], diverged=True).collapsed
    assert _summary([0.0, 0.0], diverged=True).collapsed
    assert _summary([0.3, 0.9], diverged=True).area == pytest.approx(0.45)


def test_a_summary_keeps_sums_of_seconds_and_means_of_the_rest() -> None:
    rows = [
        {"batch": 0.0, "eval": 0.3, "reward": 0.4, "clip": 0.1, "tokens": 10.0, "cpu_train_s": 1.0, "ess": 0.5},
        {"batch": 1.0, "reward": 0.5, "clip": 0.2, "tokens": 25.0, "cpu_train_s": 2.0, "cpu_eval_s": 9.0, "ess": 0.7},
        {"batch": 2.0, "eval": 0.6},
    ]
    summary = summarise_run(RunRecord("x", {"num_batches": 2, "eval_every": 2}, rows))
    assert (summary.tokens, summary.cpu) == ([0, 25], [0.0, 3.0])
    assert summary.means == {"ess": 0.6}
    assert summary.sums["cpu_eval_s"] == 9.0
    assert summary.mean_clip == pytest.approx(0.15)
    assert RunSummary.from_dict(json.loads(json.dumps(summary.as_dict()))) == summary


def _results(areas: dict[tuple[str, str], list[float]]) -> Results:
    """Make one question "q": by row and column, a run per seed with this held-out reward at every evaluation."""
    grid, summaries = [], {}
    for (row, column), rewards in areas.items():
        for seed, reward in enumerate(rewards):
            config = replace(MICRO, seed=seed, learning_rate=1.0 + len(grid))
            grid.append(Cell("q", row, column, config))
            summaries[config.run_id] = replace(_summary([0.0, reward, reward]), run_id=config.run_id)
    return Results(summaries, grid)


def test_a_difference_is_one_value_for_each_seed_over_the_columns_that_both_have_finished() -> None:
    results = _results({("new", "1"): [0.5, 0.9, 0.7], ("old", "1"): [0.4, 0.6], ("new", "2"): [0.2], ("old", "2"): [0.6]})
    # Seed 0: 0.1 and -0.4; seed 1: 0.3 in column 1 alone; seed 2: nothing to compare with.
    mean, half_width, num = results.paired("q", "new", "old", ["1", "2"], lambda run: run.area)
    assert (mean, num) == (pytest.approx(0.075), 2)
    assert half_width == pytest.approx(12.706 * 0.45 / 2)
    assert results.mean("q", "new", "1", lambda run: run.area).mean == pytest.approx(0.7)


def test_a_difference_is_marked_where_its_interval_does_not_hold_0() -> None:
    assert signed(Interval(0.1, 0.2, 3)) == "+0.100 ± 0.200"
    assert signed(Interval(-0.3, 0.2, 3)) == "**-0.300 ± 0.200**"
    assert signed(Interval(math.nan, math.nan, 0)) == "-"


def test_a_table_counts_collapses_and_leaves_lag_0_out_of_the_difference() -> None:
    results = _results(
        {(FIXED, "0"): [0.9], (FIXED, "4"): [0.5, 0.6], ("proximal", "0"): [0.1], ("proximal", "4"): [0.7, 0.8]}
    )
    last = staleness(results, "q").splitlines()[-1]
    assert last == "| proximal | 0.10 | 0.75 | **+0.200 ± 0.000** | 2 | 0/3 |"


def test_a_table_takes_its_place_and_an_unknown_one_is_refused() -> None:
    text = "a\n<!-- table: one -->\nold\n<!-- end -->\nb\n"
    assert fill(text, {"one": lambda: "new"}) == "a\n<!-- table: one -->\n\nnew\n\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match='no table "one": use one of two'):
        fill(text, {"two": lambda: "new"})


def test_the_page_and_the_file_of_all_tables_have_what_the_kept_results_give() -> None:
    made = tables_of(Results(load_summaries()), load_probes())
    assert ALL_TABLES.read_text() == one_below_the_other(made)
    for path, least in ((DOCUMENT, 3), (README, 1)):
        page = path.read_text()
        assert page.count("<!-- table: ") >= least
        assert page == fill(page, made)


def test_a_right_chain_ends_with_the_remainder() -> None:
    assert right_chain("87-30") == "57 27"
    assert right_chain("20-4") == "16 12 08 04 00"


def test_a_careful_teacher_is_right_and_a_careless_one_about_half_of_the_time() -> None:
    environment, rng = Countdown(CountdownOptions()), random.Random(0)
    shares = []
    for careful in (True, False):
        shown = [environment.demonstration(rng, careful=careful) for _ in range(400)]
        assert all(split_of(problem.content) == "train" for problem, _ in shown)
        shares.append(
            sum(environment.step({"problem": problem.content}, said.content).reward == 1 for problem, said in shown) / 400
        )
    assert shares[0] == 1.0
    assert 0.4 < shares[1] < 0.65


def _without_times(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("cpu_")}
