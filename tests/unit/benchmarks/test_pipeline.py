"""The arithmetic of the whole pipeline's benchmark: rates, spans, ratios, and that a process stays on its cores."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline.__main__ import parser, workload_of
from benchmarks.pipeline.balance import ROLLOUT_ROLES, letters_for
from benchmarks.pipeline.environment import Letters, LettersOptions, letter_share
from benchmarks.pipeline.halves import Generated, Halves, Replayed
from benchmarks.pipeline.measures import (
    CpuSample,
    Spread,
    TrainedBatch,
    cpu_seconds,
    cpu_shares,
    even_prompt,
    overall_rate,
    rates,
    seconds_per_batch,
    spread,
    steady,
    token_rate,
    trained_batches,
    waves,
)
from benchmarks.pipeline.pinned import parse_cores
from benchmarks.pipeline.processes import Use, process_use, role_of
from benchmarks.pipeline.report import Comparison, HalfFigures, RunFigures, goal_word, half_figures, tables
from benchmarks.pipeline.run import pinned_specs
from benchmarks.pipeline.timeline import Span, draw, learner_spans, rollout_spans, share
from benchmarks.pipeline.workload import Cores, Workload, choose_cores, run_files, write_config
from gspo_services.cli.run.processes import process_specs

BATCHES = [TrainedBatch(index=index, time=time, action_tokens=tokens) for index, time, tokens in
           ((0, 10.0, 100), (1, 12.0, 100), (2, 13.0, 200), (3, 15.0, 100))]  # fmt: skip


def a_run(median: float, **changes: Any) -> RunFigures:
    values: dict[str, Any] = {
        "tokens_per_s": Spread(median=median, low=median - 1, high=median + 1, count=9),
        "overall_tokens_per_s": median,
        "seconds_per_batch": Spread(median=5.0, low=5.0, high=5.0, count=9),
        "learner_trains": 0.9,
        "learner_publishes": 0.05,
        "learner_waits": 0.05,
        "rollout_paused": 0.1,
        "pause_s": Spread(median=0.5, low=0.5, high=0.5, count=9),
        "cpu": {"learner": 1.0, "scheduler": 0.8},
        "mean_lag": 1.0,
        "max_lag": 2.0,
        "strays": {},
        "num_threads": 80,
    }
    return RunFigures(**values | changes)


def a_half(median: float) -> HalfFigures:
    return HalfFigures(
        tokens_per_s=Spread(median=median, low=0.0, high=0.0, count=9), overall_tokens_per_s=median, cpu_us=1e6 / median
    )


def a_comparison(*, sglang: float, learner: float, whole: float, synchronous: float) -> Comparison:
    return Comparison(
        sglang=a_half(sglang),
        learner=a_half(learner),
        sglang_at_once=a_half(sglang / 2),
        learner_at_once=a_half(learner / 2),
        whole=a_run(whole),
        synchronous=a_run(synchronous),
        workload=Workload(),
        max_lag=2,
        same_weights=True,
    )


def a_measurement(generated: Generated, learner: Replayed, samples: list[CpuSample]) -> Halves:
    return Halves(sglang=generated, learner=learner, sglang_at_once=generated, learner_at_once=learner, samples=samples)


def test_a_batch_s_rate_counts_from_the_end_of_the_batch_before() -> None:
    assert rates(BATCHES) == [50.0, 200.0, 50.0]
    assert seconds_per_batch(BATCHES) == [2.0, 1.0, 2.0]
    assert overall_rate(BATCHES) == 400 / 5


def test_what_is_left_out_at_the_beginning_still_gives_the_starting_line() -> None:
    assert [batch.index for batch in steady(BATCHES, first=2, last=1)] == [1, 2]
    assert [batch.index for batch in steady(BATCHES, first=0, last=0)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 batches, of which 3 and 1 are left out"):
        steady(BATCHES, first=3, last=1)


def test_a_run_s_record_gives_its_batches_with_the_policy_s_own_tokens() -> None:
    row = {"batch": 3, "time": 1e9, "num_action_tokens": 70, "num_tokens": 100}
    assert trained_batches([row]) == [TrainedBatch(index=3, time=1e9, action_tokens=70)]


def test_the_spread_is_of_quartiles_and_of_extremes_where_there_are_few() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(median=3.0, low=2.0, high=4.0, count=5)
    assert spread([5.0, 1.0, 4.0]) == Spread(median=4.0, low=1.0, high=5.0, count=3)
    with pytest.raises(ValueError, match="nothing was measured"):
        spread([])


def test_cores_used_are_processor_seconds_between_two_samples() -> None:
    samples = [
        CpuSample(time=0.0, seconds={"learner": 3.0}),
        CpuSample(time=1.0, seconds={"learner": 4.0}),
        CpuSample(time=3.0, seconds={"learner": 5.0, "scheduler": 0.5}),
    ]
    assert cpu_shares(samples, 1.2, 3.5) == {"learner": 0.5, "scheduler": 0.25}
    assert cpu_shares(samples, 0.0, 0.5) == {}
    with pytest.raises(ValueError, match="must come before"):
        cpu_shares(samples, 2.0, 2.0)


def test_sglang_is_measured_from_wave_to_wave() -> None:
    answered = [1.0, 1.1, 1.2, 2.0, 2.1, 2.2, 3.0, 3.1, 3.2, 4.0]
    assert waves(answered, 3, 0.0, 9.0) == [1.2, 2.2, 3.2]
    assert waves(answered, 3, 1.3, 3.0) == [2.2]
    assert waves(answered[:2], 3, 0.0, 9.0) == []


@given(st.lists(st.integers(0, 50), min_size=2, max_size=40), st.integers(1, 5))
def test_from_wave_to_wave_every_token_counts_once(tokens: list[int], size: int) -> None:
    arrivals = [(float(time), number) for time, number in enumerate(tokens)]
    marks = waves([time for time, _ in arrivals], size, 0.0, 100.0)
    parts = [token_rate(arrivals, left, right) * (right - left) for left, right in pairwise(marks)]
    assert sum(parts) == pytest.approx(sum(number for time, number in arrivals if marks and marks[0] < time <= marks[-1]))


def test_learner_spans_are_training_then_publication_with_waiting_between_batches() -> None:
    trained = [{"batch": 0, "timestamp": "1970-01-01T00:00:10Z"}, {"batch": 1, "timestamp": "1970-01-01T00:00:20+00:00"}]
    first, second = {"batch": 0, "train_s": 4.0, "publish_s": 1.0}, {"batch": 1, "train_s": 6.0, "publish_s": 0.5}
    rows: list[dict[str, Any]] = [first, {"batch": 2}, second]
    spans = learner_spans(trained, rows)
    assert [(span.kind, span.begin, span.end) for span in spans] == [
        ("training", 5.0, 9.0),
        ("publication", 9.0, 10.0),
        ("waiting", 10.0, 13.5),
        ("training", 13.5, 19.5),
        ("publication", 19.5, 20.0),
    ]
    assert share(spans, "waiting", 5.0, 20.0) == pytest.approx(3.5 / 15)
    assert share(spans, "training", 8.0, 14.0) == pytest.approx(1.5 / 6)


def test_rollout_spans_follow_the_scheduler_and_pauses_lie_over_them() -> None:
    at_work = [True, True, True, False, False, True, False, True, False, True, False]
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.3, 6.0, 7.0, 7.2, 8.0]
    samples = [
        CpuSample(time=time, seconds={}, running=frozenset({"scheduler", "agent"} if busy else {"agent"}))
        for time, busy in zip(times, at_work, strict=True)
    ]
    loaded = [{"policy_version": 7, "pause_s": 0.5, "timestamp": "1970-01-01T00:00:02.5Z"}]
    spans = rollout_spans(samples, loaded, "scheduler")
    assert [(span.kind, span.begin, span.end, span.label) for span in spans] == [
        ("generation", 0.0, 2.0, ""),
        ("waiting", 2.0, 4.0, ""),
        ("generation", 4.0, 6.0, ""),
        ("waiting", 6.0, 7.0, ""),
        ("generation", 7.0, 7.2, ""),
        ("waiting", 7.2, 8.0, ""),
        ("weights", 2.0, 2.5, "v7"),
    ]


def test_the_picture_is_written(tmp_path: Path) -> None:
    spans = [Span(kind="training", begin=100.0, end=104.0, label="3"), Span(kind="waiting", begin=90.0, end=100.0)]
    lanes = {"synchronous": {"learner": spans}, "asynchronous": {"learner": spans}}
    draw(lanes, {"synchronous": 99.0, "asynchronous": 98.0}, 10.0, tmp_path / "deep" / "lanes.png")
    assert (tmp_path / "deep" / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_over_the_slower_half_and_over_taking_turns() -> None:
    found = a_comparison(sglang=1000.0, learner=800.0, whole=720.0, synchronous=400.0)
    assert found.of_slower_half == pytest.approx(0.9)
    assert found.of_slower_half_at_once == pytest.approx(1.8)
    assert found.of_synchronous == pytest.approx(1.8)
    assert found.balance == pytest.approx(0.8)
    assert found.as_json()["of_synchronous"] == pytest.approx(1.8)


@pytest.mark.parametrize(("sglang", "learner", "most"), [(1000.0, 1000.0, 2.0), (1000.0, 500.0, 1.5), (500.0, 1000.0, 1.5)])
def test_asynchrony_can_at_most_hide_the_faster_half(sglang: float, learner: float, most: float) -> None:
    # A token takes 1/sglang + 1/learner seconds in turns, and the larger of the two at the same time.
    in_turns, at_once = 1 / sglang + 1 / learner, max(1 / sglang, 1 / learner)
    found = a_comparison(sglang=sglang, learner=learner, whole=1.0, synchronous=1.0)
    assert found.most_gain == pytest.approx(in_turns / at_once) == pytest.approx(most)


def test_the_tables_say_figures_ratios_and_whether_a_goal_is_met() -> None:
    lines = tables(a_comparison(sglang=1000.0, learner=800.0, whole=720.0, synchronous=600.0)).splitlines()
    assert "| 3. the whole, max_lag 2 | 720 (719 to 721) | 720 |" in lines
    assert "| **3 of the slower of 1 and 2** | 0.90 | at least 0.93: missed |" in lines
    assert "| **3 of 4** | 1.20 | at least 1.5: missed |" in lines
    assert "| cores used: scheduler | 0.80 | 0.80 |" in lines
    # 0.8 and 1.0 cores for 720 and 600 tokens a second.
    assert "| SGLang | 1,000 | 1,111 | 1,333 |" in lines
    assert "| learner | 1,250 | 1,389 | 1,667 |" in lines
    assert goal_word(1.5, 1.5) == "at least 1.5: met"


def test_on_a_busy_machine_the_tables_have_ratios_alone() -> None:
    found = a_comparison(sglang=1000.0, learner=800.0, whole=720.0, synchronous=600.0)
    said = tables(replace(found, others_cores=0.4))
    lines = said.splitlines()
    assert "| action tokens per second / those of 2 | median (quartiles) | all together |" in lines
    assert "| 3. the whole, max_lag 2 | 0.90 (0.90 to 0.90) | 0.90 |" in lines
    assert "| SGLang | 1.00 | 1.11 | 1.33 |" in lines
    assert lines[-1].startswith("The machine was busy: others used 0.4 of its cores, so only ratios are shown.")
    assert "(s)" not in said
    assert "busy" not in tables(found)


def test_sglang_beside_the_learner_counts_only_while_the_learner_trains() -> None:
    # A thousand tokens a second until the learner is steady, ten until its last batch, then a hundred.
    arrivals = [(float(time), 1000 if time <= 10 else 10 if time <= 18 else 100) for time in range(1, 40)]
    trained = [TrainedBatch(index=index, time=6.0 + 4 * index, action_tokens=8) for index in range(4)]
    learner = Replayed(batches=trained, same_weights=True)
    generated = Generated(arrivals=arrivals, answered=[time for time, _ in arrivals], end=34.0, at_a_time=2)
    used = {"scheduler": 0.75, "server": 0.25, "learner": 0.5, "broker": 1.0}
    samples = [
        CpuSample(time=float(time), seconds={role: share * time for role, share in used.items()}) for time in range(40)
    ]
    figures = half_figures(a_measurement(generated, learner, samples), [1, 2, 3])
    assert figures["sglang_at_once"].cpu_us == pytest.approx(1e6 / 10)
    assert figures["learner"].cpu_us == pytest.approx(1e6 * 0.5 / 2)
    assert figures["sglang_at_once"].overall_tokens_per_s == pytest.approx(10.0)
    # From the second answer to the last one that came while others were still sent.
    assert figures["sglang"].overall_tokens_per_s == pytest.approx((8 * 1000 + 8 * 10 + 16 * 100) / 32)
    assert figures["learner"].overall_tokens_per_s == pytest.approx(2.0)


def test_the_learner_alone_counts_the_batches_that_count_for_the_whole() -> None:
    # Later batches have fewer action tokens and take as long: the whole trains no others in its steady part.
    trained = [TrainedBatch(index=index, time=4.0 * index, action_tokens=90 - 10 * index) for index in range(6)]
    generated = Generated(arrivals=[(float(time), 1) for time in range(1, 30)], answered=[*range(1, 30)], end=29.0)
    samples = [CpuSample(time=float(time), seconds={"learner": time}) for time in range(30)]
    halves = a_measurement(generated, Replayed(batches=trained, same_weights=True), samples)
    assert half_figures(halves, [2, 3, 4])["learner"].overall_tokens_per_s == pytest.approx((60 + 50) / 8)
    assert half_figures(halves, [3, 4, 5])["learner"].overall_tokens_per_s == pytest.approx((50 + 40) / 8)


def test_requests_that_never_fill_sglang_are_no_measurement() -> None:
    learner = Replayed(batches=BATCHES, same_weights=True)
    idle = Generated(arrivals=[(1.0, 5)], answered=[1.0, 2.0, 3.0], end=2.5, at_a_time=2)
    with pytest.raises(ValueError, match="3 requests were answered, 2 at a time"):
        half_figures(a_measurement(idle, learner, []), [1, 2, 3])


def test_a_run_has_the_workload_s_sizes_and_its_halves_their_cores(tmp_path: Path) -> None:
    workload = Workload(prompt_letters=100, turn_tokens=40, groups_per_batch=4, mini_batches=2, max_running=24)
    write_config(tmp_path / "config.toml", workload, tmp_path / "model")
    files = run_files(tmp_path / "config.toml", tmp_path / "run", num_batches=5, max_lag=1)
    settings = files.settings
    assert (settings.sampling.max_turn_tokens, settings.batch.groups_per_batch, settings.batch.mini_batches) == (40, 4, 2)
    assert (settings.rollout.max_running, settings.batch.max_lag, settings.run.num_batches) == (24, 1, 5)
    assert settings.environment.options == {"shortest": 75, "longest": 125}
    assert settings.sampling.max_tokens > 40 + 125 + 3
    cores = Cores(rollout=frozenset({3}), learner=frozenset({0, 2}))
    modules = {spec.name: (spec.module, spec.arguments[:2]) for spec in pinned_specs(process_specs(settings, ["c"]), cores)}
    assert modules["learner"] == ("benchmarks.pipeline.pinned", ("0,2", "gspo_services.learner"))
    assert modules["rollout-0"] == ("benchmarks.pipeline.pinned", ("3", "gspo_services.rollout"))
    assert modules["broker"] == ("gspo_services.broker", ("c",))


def test_every_size_can_be_given_on_the_command_line() -> None:
    assert workload_of(parser().parse_args([])) == Workload()
    given_sizes = parser().parse_args(["--hidden-size", "64", "--turn-tokens", "12"])
    assert workload_of(given_sizes) == Workload(hidden_size=64, turn_tokens=12)


def test_prompts_are_made_as_long_as_makes_training_as_slow_as_generation() -> None:
    # 50 action tokens cost 100 ms to generate; at 0.5 ms a token the learner has 100 ms for 200 tokens, 150 of the prompt.
    assert even_prompt(rollout_s=0.002, learner_s=0.0005, action_tokens=50, target=1.0) == pytest.approx(150)
    assert even_prompt(rollout_s=0.002, learner_s=0.0005, action_tokens=50, target=1.5) == pytest.approx(250)
    assert even_prompt(rollout_s=0.001, learner_s=0.01, action_tokens=50, target=1.0) == 0.0


def test_the_balance_counts_all_of_sglang_and_its_agent_by_processor_time() -> None:
    used = {"scheduler": 6.0, "server": 1.0, "agent": 1.0, "learner": 3.0, "broker": 9.0}
    samples = [CpuSample(time=10.0, seconds={}), CpuSample(time=30.0, seconds=used)]
    assert cpu_seconds(samples, 10.0, 30.0, ROLLOUT_ROLES) == pytest.approx(8.0)
    assert cpu_seconds(samples, 10.0, 30.0, ("learner",)) == pytest.approx(3.0)


def test_letters_are_the_tokens_of_an_even_prompt_without_its_markers_within_bounds() -> None:
    # 160 us an action token, 100 us a token of the learner's: 1.05 * 160 / 100 - 1 of 50 tokens; 3 of them are markers.
    measured: dict[str, Any] = {
        "rollout_cpu_s": 8.0,
        "learner_cpu_s": 3.0,
        "action_tokens": 50_000,
        "learner_tokens": 30_000,
    }
    assert letters_for(**measured, episodes=1000) == round(0.68 * 50) - 3
    assert letters_for(**measured | {"rollout_cpu_s": 900.0}, episodes=1000) == 400
    assert letters_for(**measured | {"learner_cpu_s": 900.0}, episodes=1000) == 8


def test_cores_that_are_not_there_or_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="cores \\[4096\\] are not there"):
        choose_cores("4096", "0")
    with pytest.raises(ValueError, match="given to both halves"):
        choose_cores("0", "0")
    with pytest.raises(ValueError, match="numbers separated by commas"):
        parse_cores("0-3")
    assert parse_cores("0,2") == {0, 2}


def test_a_pinned_module_and_what_it_starts_stay_on_their_core() -> None:
    ask = "import os; print(sorted(os.sched_getaffinity(0)))"
    statement = f"import subprocess, sys; {ask}; sys.stdout.flush(); subprocess.run([sys.executable, '-c', {ask!r}])"
    command = [sys.executable, "-m", "benchmarks.pipeline.pinned", "0", "timeit", "-n", "1", "-r", "1", statement]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.splitlines()[:2] == ["[0]", "[0]"]


def test_roles_are_told_by_command_lines() -> None:
    agent = ["python", "-m", "benchmarks.pipeline.pinned", "0", "gspo_services.rollout", "config.toml"]
    assert role_of(agent, "") == "agent"
    assert role_of(["python", "-c", "from multiprocessing..."], "agent") == "agent"
    assert role_of(["sglang::scheduler"], "server") == "scheduler"
    assert role_of(["python", "-m", "gspo_services.shared.sglang_cpu.launch"], "agent") == "server"
    assert role_of(["python", "-m", "benchmarks.pipeline.pinned", "1", "gspo_services.runs.replay", "run"], "") == "learner"
    assert role_of(["bash"], "") == ""


def test_the_kernel_s_line_of_a_process_gives_its_state_and_time_whatever_its_name() -> None:
    stat = "7 (a) R b) R 1 7 7 0 -1 4194304 100 0 0 0 150 50 900 900 20 0 1 0 5 0 0"
    assert process_use(stat) == Use(runs=True, cpu_s=200 / os.sysconf("SC_CLK_TCK"))
    assert not process_use(stat.replace(") R 1", ") S 1")).runs
    begin = process_use(Path("/proc/self/stat").read_text()).cpu_s
    assert begin == pytest.approx(sum(os.times()[:2]), abs=0.2)


def test_every_answer_has_a_reward_and_letters_pay() -> None:
    assert letter_share("ab1Z") == 0.75
    assert letter_share("") == 0.0
    assert letter_share("éß") == 0.0
    environment = Letters(LettersOptions(shortest=20, longest=20))
    task = environment.tasks("train").task(0)
    assert len(str(task["problem"])) == 20
    assert environment.step({}, "ab..").reward == 0.5
    assert environment.step({}, "ab..").done
    with pytest.raises(ValueError, match="must not be larger"):
        Letters(LettersOptions(shortest=40, longest=20))
