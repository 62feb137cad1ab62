"""The comparison with TRL, made from both records: arrivals, ratios, settings, tables."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.against_trl.__main__ import START_MODELS
from benchmarks.against_trl.curve import (
    Arrival,
    Point,
    Run,
    System,
    arrival,
    best_setting,
    common_samples,
    mean_arrival_s,
    mean_reward,
)
from benchmarks.against_trl.kept import kept
from benchmarks.against_trl.ours import read_ours
from benchmarks.against_trl.report import (
    Comparison,
    as_data,
    chosen_setting,
    learner_table,
    parts_table,
    plot,
    table,
    verdict,
)
from benchmarks.against_trl.settings import TASKS
from benchmarks.against_trl.theirs import read_theirs
from benchmarks.first_batch import MOMENTS
from benchmarks.first_batch import report as first_batch_report
from benchmarks.watch import Watch, said_of, watched
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.tasks.environments.registry import create_environment

BEGIN = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC).timestamp()


def point(seconds: float, samples: int, reward: float, evaluation_s: float = 0.0) -> Point:
    return Point(seconds=seconds, samples=samples, evaluation_s=evaluation_s, reward=reward)


def a_run(
    system: System = "gspo", setting: str = "plain", seed: int = 0, *, s_per_batch: float = 2.0, reached: bool = True
) -> Run:
    """Make four batches of 256, evaluated at every second one; the last reaches the target, or not."""
    rewards = (0.2, 0.5, 0.9 if reached else 0.8)
    return Run(
        system=system,
        setting=setting,
        seed=seed,
        points=tuple(point(2 * index * s_per_batch, 512 * index, reward) for index, reward in enumerate(rewards)),
        start_s=30.0,
        batch_ends_s=tuple(index * s_per_batch for index in (1, 2, 3, 4)),
        seconds=4 * s_per_batch,
        batch_parts={"training": s_per_batch / 2},
        cpu_s={"learner": 1.0, "broker": 0.5},
        rates={"generated, overall": 700.0},
        tokens={"answer, mean": 3.0 + seed},
    )


def compared(*runs: Run) -> Comparison:
    return Comparison.of(runs, mini_batches=4, samples_per_batch=256)


def test_a_run_arrives_with_its_first_evaluation_at_the_target_also_when_it_falls_below_again() -> None:
    points = [point(1, 0, 0.2), point(10, 512, 0.85, 3.0), point(20, 1024, 0.6, 4.0), point(30, 1536, 0.9, 5.0)]
    assert arrival(points) == Arrival(seconds=10, seconds_without_evaluation=7, samples=512)
    assert arrival(points, 0.86) == Arrival(seconds=30, seconds_without_evaluation=25, samples=1536)
    assert arrival(points, 0.91) is None


def test_the_mean_reward_is_the_area_under_the_curve_over_its_width() -> None:
    points = [point(0, 0, 0.2), point(1, 512, 0.6), point(2, 2048, 0.8), point(3, 4096, 1.0)]
    assert mean_reward(points, 2048) == pytest.approx((512 * 0.4 + 1536 * 0.7) / 2048)


@settings(deadline=None)
@given(st.lists(st.integers(1, 999), min_size=1, max_size=9, unique=True), st.floats(0, 1))
def test_the_mean_of_a_reward_that_never_changes_is_that_reward(widths: list[int], reward: float) -> None:
    samples = [0, *sorted(widths)]
    assert mean_reward([point(1, each, reward) for each in samples], samples[-1]) == pytest.approx(reward)


def test_a_mean_reward_up_to_where_nothing_was_evaluated_is_refused() -> None:
    points = [point(0, 0, 0.2), point(1, 512, 0.6)]
    with pytest.raises(ValueError, match=r"samples is 600, evaluations are at \[0, 512\]"):
        mean_reward(points, 600)
    with pytest.raises(ValueError, match="samples is 0"):
        mean_reward(points, 0)


def test_a_run_says_what_it_took_in_one_line() -> None:
    assert str(a_run(s_per_batch=3.0)) == "3.00 s a batch, 1.50 CPU s a batch, to 0.85: 12.0 s, 1024 samples"
    assert str(a_run(reached=False)).endswith("to 0.85: -")


def test_rewards_are_compared_up_to_the_last_samples_at_which_both_were_evaluated() -> None:
    one = replace(a_run(), points=(point(0, 0, 0.1), point(1, 512, 0.1), point(2, 1024, 0.1)))
    other = replace(a_run(), points=(point(0, 0, 0.1), point(1, 512, 0.1), point(2, 1280, 0.1)))
    assert common_samples([one, other]) == 512
    assert common_samples([one]) == 1024


def test_a_seed_that_never_arrives_makes_the_mean_infinite() -> None:
    assert mean_arrival_s([a_run(), a_run(s_per_batch=4.0)]) == pytest.approx((8 + 16) / 2)
    assert math.isinf(mean_arrival_s([a_run(), a_run(reached=False)]))


def test_the_best_setting_arrives_first_and_where_none_arrives_has_the_shortest_batches() -> None:
    slow, fast = a_run(setting="slow", s_per_batch=3.0), a_run(setting="fast", s_per_batch=1.0)
    assert best_setting([slow, fast]) == "fast"
    assert best_setting([slow, replace(a_run(setting="quick but wrong", s_per_batch=0.1, reached=False))]) == "slow"
    lost = [a_run(setting="a", s_per_batch=2.0, reached=False), a_run(setting="b", s_per_batch=1.0, reached=False)]
    assert best_setting(lost) == "b"
    with pytest.raises(ValueError, match="no runs"):
        best_setting([])


def test_settings_are_compared_on_the_seeds_that_all_of_them_ran() -> None:
    tried = [a_run(setting="a", s_per_batch=2.0), a_run(setting="b", s_per_batch=3.0)]
    unlucky = a_run(setting="a", seed=1, s_per_batch=50.0)
    assert chosen_setting([*tried, unlucky]) == "a"


@pytest.mark.parametrize(("ours", "expected", "words"), [(1.4, 0.7, "is met"), (1.5, 0.75, "is missed")])
def test_the_goal_is_met_at_seven_tenths_of_the_seconds_of_trl(ours: float, expected: float, words: str) -> None:
    comparison = compared(a_run(s_per_batch=ours), a_run("trl", s_per_batch=2.0))
    assert comparison.ratio == pytest.approx(expected)
    assert f"{expected:.2f} of TRL's; the goal of 0.7 {words}" in verdict(comparison)


def test_the_best_settings_are_compared_over_all_seeds_and_the_others_kept() -> None:
    runs = [
        a_run(setting="one", s_per_batch=9.0),
        a_run(setting="two", s_per_batch=1.0),
        a_run("trl", "one", s_per_batch=2.0),
        a_run("trl", "two", s_per_batch=5.0),
        a_run(setting="two", seed=1, s_per_batch=3.0),
        a_run("trl", "one", seed=1, s_per_batch=2.0),
    ]
    comparison = compared(*runs)
    assert [(run.setting, run.seed) for run in comparison.ours] == [("two", 0), ("two", 1)]
    assert [(run.setting, run.seed) for run in comparison.theirs] == [("one", 0), ("one", 1)]
    assert [(run.system, run.setting) for run in comparison.others] == [("gspo", "one"), ("trl", "two")]
    assert comparison.ratio == pytest.approx(((4 + 12) / 2) / ((8 + 8) / 2))


def test_no_ratio_is_told_of_a_run_that_never_arrived() -> None:
    comparison = compared(a_run(), a_run("trl", reached=False))
    assert math.isnan(comparison.ratio)
    assert "run more batches" in verdict(comparison)
    assert "| seconds to 0.85 | 8.0 | never | - |" in table(comparison)
    assert as_data(comparison)["ratio"] is None
    assert json.loads(json.dumps(as_data(comparison)))["trl"][0]["points"][2]["reward"] == 0.8


def test_the_table_has_steps_samples_and_ratios() -> None:
    rows = table(compared(a_run(s_per_batch=3.0), a_run("trl", "1 thread"))).splitlines()
    assert rows[0] == "| seeds 0 | this project, plain | TRL, 1 thread | ratio |"
    assert "| seconds to 0.85 | 12.0 | 8.0 | 1.50 |" in rows
    assert "| samples to 0.85 | 1024 | 1024 | 1.00 |" in rows
    assert "| optimizer steps to 0.85 | 16 | 16 | 1.00 |" in rows
    assert "| mean reward over the first 1024 samples | 0.525 | 0.525 | 1.00 |" in rows
    assert "| CPU seconds a batch | 1.50 | 1.50 | 1.00 |" in rows


def test_a_busy_machine_is_told_and_its_seconds_are_not() -> None:
    runs = [replace(each, others_cores=0.4, peak_mib=mib) for each, mib in ((a_run(), 3000.0), (a_run("trl"), 2000.0))]
    rows = table(compared(*runs)).splitlines()
    assert "| seconds to 0.85 | - | - | 1.00 |" in rows
    assert "| CPU seconds a batch | - | - | 1.00 |" in rows
    assert "| samples to 0.85 | 1024 | 1024 | 1.00 |" in rows
    assert "| peak of memory, MiB | 3000 | 2000 | 1.50 |" in rows
    said = verdict(compared(*runs))
    assert "Memory: 1.50 of TRL's; the goal of 1.2 is missed." in said
    assert "The machine was busy: others used 0.4 of its cores, so only ratios are shown." in said
    assert "busy" not in verdict(compared(a_run(), a_run("trl")))
    assert learner_table(compared(*runs)) == ""
    parts = parts_table(compared(*runs)).splitlines()
    assert parts[0] == "| run | seconds of a batch / TRL's | CPU seconds of a batch / TRL's | tokens/s | tokens |"
    assert parts[2].startswith("| this project, plain (1.00 of TRL's seconds to 0.85) | ")
    assert " | - | " in parts[2]


def test_what_a_benchmark_starts_is_not_other_work() -> None:
    busy = "import time; begin = time.process_time()\nwhile time.process_time() < begin + 0.5: pass"
    with watched(0.05) as watch:
        subprocess.run([sys.executable, "-c", busy], check=True)
    assert watch.looks[-1][1]["other"] > 0.2
    itself = Watch()
    itself.look(psutil.Process(), 0, memory=False)
    # Other tests may have left this process a server.
    children_s = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
    in_sums_s = sum(itself.looks[-1][1].values())
    assert in_sums_s < children_s + time.process_time() / 2, "this process is in neither sum"
    assert said_of(0.05) == ""
    assert said_of(0.14).startswith("The machine was busy: others used 0.1 of its cores")


def test_the_moments_of_a_start_on_a_busy_machine_are_shares_of_the_first_trained_batch() -> None:
    start = {name: 4.0 * (index + 1) for index, (name, _, _) in enumerate(MOMENTS)}
    assert "| the first batch is trained | 28.0 |" in first_batch_report([start], {}, 0.0).splitlines()
    lines = first_batch_report([start], {"broker": 7.0}, 0.4).splitlines()
    assert "| since the command | share of the time to the first trained batch |" in lines
    assert "| the broker listens | 0.14 |" in lines
    assert "| broker | 0.25 |" in lines
    assert lines[-1].startswith("The machine was busy: others used 0.4")


def test_a_task_has_a_target_of_its_own() -> None:
    early = [replace(each, target=0.5) for each in (a_run(s_per_batch=1.0), a_run("trl"))]
    assert "| seconds to 0.5 | 2.0 | 4.0 | 0.50 |" in table(compared(*early)).splitlines()
    assert as_data(compared(*early))["target"] == 0.5


def test_the_parts_of_a_batch_are_means_over_seeds_of_one_setting() -> None:
    runs = [a_run(s_per_batch=2.0), a_run(seed=1, s_per_batch=4.0), a_run("trl", "1 thread")]
    assert (
        "| this project, plain (12.0 s to 0.85) | training 1.50 | learner 1.00, broker 0.50 | generated, overall 700 |"
        " answer, mean 3.50 |"
    ) in parts_table(compared(*runs)).splitlines()


def test_the_learners_own_profile_is_told_of_the_runs_that_made_one() -> None:
    profiled = [replace(a_run(seed=seed), learner_parts={"wait": 1.0 + seed, "backward": 0.5}) for seed in (0, 1)]
    theirs = [a_run("trl", seed=0), a_run("trl", seed=1)]
    assert learner_table(compared(*profiled, *theirs)).splitlines()[2:] == [
        "| this project, plain | wait 1.50, backward 0.50 |"
    ]
    assert learner_table(compared(a_run(), a_run("trl"))) == ""


def test_every_task_has_a_configuration_that_both_systems_can_run_and_a_model_to_start_from() -> None:
    assert set(TASKS) == set(START_MODELS)
    for name, task in TASKS.items():
        for setting in task.ours.values():
            settings = load_settings(task.config, [*setting, f"run.num_batches={task.num_batches}"])
            num_samples = settings.batch.groups_per_batch * settings.batch.group_size
            if name == "sums":
                continue  # Its rows come with its model.
            environment = create_environment(settings.environment.name, settings.environment.options)
            start = environment.start(environment.tasks("eval").task(0), seed=0)
            assert environment.step(start.state, "no answer").reward == 0.0
        for trl in task.theirs.values():
            assert num_samples // settings.batch.mini_batches % (trl.micro_batch or 1) == 0


def test_the_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "images" / "curve.png"
    plot(compared(a_run(), a_run("trl")), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def trl_row(event: str, seconds: float, **values: Any) -> dict[str, Any]:
    tokens = {"generated_tokens": 0, "packed_tokens": 0, "padded_tokens": 0}
    return {"event": event, "seconds": seconds, "seconds_of": {}, "cpu_seconds_of": {}, "cpu_s": 5.0, **tokens, **values}


def test_what_trl_recorded_is_read_with_generation_training_and_evaluation_apart() -> None:
    rows = [
        trl_row("begin", 0.0, start_s=20.0),
        trl_row("eval", 0.5, batch=0, reward=0.25, evaluation_s=0.5),
        trl_row("batch", 3.0, batch=1),
        trl_row("batch", 6.0, batch=2),
        trl_row("eval", 6.5, batch=2, reward=0.5, evaluation_s=1.0),
        trl_row(
            "end",
            8.0,
            seconds_of={"generation": 2.0, "old log-probs": 1.0, "evaluation": 1.0},
            cpu_seconds_of={"generation": 1.0, "old log-probs": 0.5, "evaluation": 0.5},
            generated_tokens=1536,
            packed_tokens=5120,
            padded_tokens=20480,
            cpu_s=11.0,
        ),
    ]
    run = read_theirs(rows, setting="1 thread", seed=3, samples_per_batch=256)
    assert run.points == (point(0.5, 0, 0.25, 0.5), point(6.5, 512, 0.5, 1.0))
    assert run.batch_parts == {"generation": 1.0, "old log-probs": 0.5, "evaluation": 0.5, "training": 2.0}
    assert (run.start_s, run.seconds, run.batches, run.seed) == (20.0, 8.0, 2, 3)
    assert run.batch_ends_s == (3.0, 6.0)
    assert run.cpu_s == {"generation": 0.5, "old log-probs": 0.25, "evaluation": 0.25, "training": 2.0}
    assert run.rates == {
        "generated, overall": 192.0,
        "generated, while generating": 768.0,
        "trained, while training": 1024.0,
    }
    assert run.tokens == {
        "answer, mean": 3.0,
        "longest row of a batch": 40.0,
        "share of padded rows that is tokens": 0.25,
    }


def test_a_record_of_trl_without_an_end_is_refused() -> None:
    rows = [trl_row("begin", 0.0, start_s=20.0), trl_row("batch", 3.0, batch=1)]
    with pytest.raises(ValueError, match="1 batches and ends with 'batch'"):
        read_theirs(rows, setting="1 thread", seed=0, samples_per_batch=256)


def test_seconds_of_a_run_count_from_the_first_rollout_that_served(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name, second in (("rollout-0", 8), ("rollout-1", 5)):
        lines = [{"event": "ready"}, {"event": "weights_loaded", "timestamp": f"2026-11-21T12:00:{second:02}Z"}]
        lines.append({"event": "weights_loaded", "timestamp": "2026-11-21T12:00:30Z"})
        (logs / f"{name}.log").write_text("noise\n" + "".join(json.dumps(line) + "\n" for line in lines))
    batch = {"event": "batch", "num_trajectories": 256, "train_s": 1.5, "publish_s": 0.5}
    rows = [
        {"event": "eval", "eval/reward": 0.25, "batch": 0, "time": BEGIN + 7},
        {**batch, "batch": 0, "num_tokens": 3000, "num_action_tokens": 700, "time": BEGIN + 10},
        {**batch, "batch": 1, "num_tokens": 6000, "num_action_tokens": 1300, "time": BEGIN + 15},
        {"event": "eval", "eval/reward": 0.75, "batch": 2, "time": BEGIN + 16},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_ours(tmp_path, {"learner": 1.0}, setting="2 servers", seed=1, command_at=BEGIN - 40)
    assert run.points == (point(2, 0, 0.25), point(11, 512, 0.75))
    assert (run.start_s, run.seconds, run.batch_ends_s, run.cpu_s) == (45, 10, (5, 10), {"learner": 1.0})
    assert run.batch_parts == {"training": 1.5, "publication": 0.5, "waiting for samples": 3.0}
    assert run.rates == {"generated, overall": 200.0, "trained, while training": 3000.0}
    assert run.tokens == {"answer, mean": 2000 / 512}
    assert run.learner_parts == {}
    profiles = [
        {"tokens": 3000, "padding_efficiency": 0.5, "seconds": {"wait": 1.0, "backward": 3.0}},
        {"tokens": 6000, "padding_efficiency": 0.25, "seconds": {"wait": 2.0, "backward": 4.0}},
    ]
    (tmp_path / "profile.jsonl").write_text("".join(json.dumps(row) + "\n" for row in profiles))
    run = read_ours(tmp_path, {}, setting="2 servers", seed=1, command_at=BEGIN - 40)
    assert run.learner_parts == {"wait": 1.5, "backward": 3.5}
    assert run.tokens == {
        "answer, mean": 2000 / 512,
        "longest row of a batch": (6000 + 24000) / 512,
        "share of padded rows that is tokens": 0.3,
    }


def test_cpu_seconds_of_a_batch_leave_out_the_start_and_the_end() -> None:
    looks = [
        (0, {"learner": 9.0}),
        (1, {"learner": 10.0}),
        (1, {"learner": 10.5, "agent": 3.0}),
        (3, {"learner": 13.0, "agent": 5.0}),
        (3, {"learner": 99.0, "agent": 99.0}),
    ]
    assert Watch(looks=looks).cpu_s_of_a_batch() == {"agent": 2.5, "learner": 1.5}
    assert Watch(looks=looks[:3]).cpu_s_of_a_batch() == {}
    assert Watch().cpu_s_of_a_batch() == {}


def test_a_watched_process_is_not_among_the_others() -> None:
    busy = "import time; begin = time.process_time()\nwhile time.process_time() < begin + 0.5: pass"
    seen, unseen = Watch(), Watch()
    process = psutil.Popen([sys.executable, "-c", busy])
    while process.status() != psutil.STATUS_ZOMBIE:
        seen.look(process, 0)
    process.wait()
    assert seen.peak_mib > 1
    assert 0.3 < seen.looks[-1][1]["other"] < 1
    # Other work on the machine is in both.
    assert unseen.others_cores() > seen.others_cores()


def test_a_run_that_is_finished_is_not_made_again_unless_something_that_decides_it_changes(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> Run:
        made.append(1)
        return a_run("trl")

    of = {"system": "trl", "seed": 0, "set": {"threads": 2}}
    assert [kept(tmp_path, of, make), kept(tmp_path, of, make)] == [a_run("trl")] * 2
    assert len(made) == 1
    kept(tmp_path, of | {"set": {"threads": 1}}, make)
    assert len(made) == 2
    for path in tmp_path.iterdir():
        path.write_text("{")
    with pytest.raises(msgspec.DecodeError):
        kept(tmp_path, of, make)
