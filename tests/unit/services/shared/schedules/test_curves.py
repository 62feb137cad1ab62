"""The value of a setting in each batch, against values worked out by hand, and the forms in which a user writes it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gspo_protocol.messages import GroupSampling, TrainingValues
from gspo_services.shared.schedules import RunSchedules, sampling_of
from gspo_services.shared.settings import Settings, load_settings, read_run_settings, write_run_settings

RATE = 1.0


def rates(**schedule: Any) -> list[float]:
    """The learning rate, from 1, in each of ten batches and in the one after the end."""
    settings = settings_with(learning_rate=schedule)
    found = [RunSchedules(settings).training_at(batch).learning_rate for batch in range(11)]
    return [round(value, 6) for value in found if value is not None]


def settings_with(sampling: dict[str, Any] | None = None, **schedule: Any) -> Settings:
    plain = {
        "run": {"num_batches": 10},
        "learner": {"learning_rate": RATE},
        "sampling": sampling or {},
        "schedule": schedule,
    }
    return Settings.model_validate(plain)


def test_a_linear_schedule_falls_in_a_straight_line_and_the_last_batch_is_just_before_its_end() -> None:
    assert rates(shape="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]


def test_a_warm_up_ends_at_the_whole_value_and_the_change_begins_after_it() -> None:
    assert rates(shape="linear", warmup=4, to=0.4) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.5]


def test_a_cosine_is_half_a_period_of_one() -> None:
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * batch / 10)) / 2 for batch in range(10)]
    assert rates(shape="cosine", to=0.2)[:10] == pytest.approx(expected, abs=1e-6)
    assert rates(shape="cosine", to=0.2)[5] == 0.6


def test_a_constant_rate_decays_over_its_last_batches_only() -> None:
    assert rates(shape="constant", warmup=2, decay=4) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.25]
    assert rates(shape="constant", warmup=2) == [0.5, *[1.0] * 10]


def test_a_change_may_begin_and_end_within_the_run() -> None:
    assert rates(shape="linear", start=2, end=6, to=0.2) == [1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2, 0.2]


def test_steps_hold_from_their_batch_on() -> None:
    settings = settings_with({"max_turn_tokens": 16, "max_tokens": 64}, max_tokens={"steps": [[2, 128], [5, 256]]})
    found = [RunSchedules(settings).sampling_at(batch) for batch in (0, 1, 2, 4, 5, 9, 30)]
    assert [each.max_tokens for each in found] == [64, 64, 128, 128, 256, 256, 256]
    # Without a limit of its own an episode has as many tokens as one sequence.
    assert [each.max_episode_tokens for each in found] == [64, 64, 128, 128, 256, 256, 256]
    assert settings.largest_sampling.max_tokens == 256


def test_tokens_are_whole_numbers_in_every_batch() -> None:
    curve = {"shape": "linear", "to": 64}
    settings = settings_with({"max_turn_tokens": 15, "max_tokens": 256}, max_turn_tokens=curve)
    found = [RunSchedules(settings).sampling_at(batch).max_turn_tokens for batch in range(10)]
    assert found == [15, 20, 25, 30, 35, 40, 44, 49, 54, 59]
    assert all(isinstance(tokens, int) for tokens in found)


def test_what_is_not_scheduled_is_the_setting_itself() -> None:
    settings = settings_with({"temperature": 0.7, "max_episode_tokens": 999})
    assert RunSchedules(settings).sampling_at(3) == sampling_of(settings.sampling) == GroupSampling(0.7, 16, 256, 999)
    assert RunSchedules(settings).training_at(3) == TrainingValues()
    assert settings.largest_sampling == settings.sampling


def test_a_schedule_is_written_as_one_line_of_toml_or_of_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[schedule]\nmax_tokens = {steps = [[20, 512]]}\n")
    overrides = ["schedule.learning_rate={shape = 'cosine', warmup = 10, to = 1e-7}", "schedule.temperature.shape=linear"]
    settings = load_settings(file, [*overrides, "schedule.temperature.to=0.5", f"run.directory={tmp_path / 'run'}"], {})
    assert settings.schedule.max_tokens is not None
    assert settings.schedule.max_tokens.steps == [(20, 512.0)]
    assert settings.schedule.learning_rate is not None
    assert settings.schedule.learning_rate.warmup == 10
    assert RunSchedules(settings).sampling_at(50).temperature == 0.75
    # As the run's directory keeps them.
    settings.run.directory.mkdir()
    write_run_settings(settings)
    assert read_run_settings(settings.run.directory).schedule == settings.schedule
    assert json.loads((settings.run.directory / "settings.json").read_text())["schedule"]["eps_low"] is None
