"""Schedules that cannot hold are refused with the batch, the value and the way out."""

from pathlib import Path

import pytest

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import load_settings

HEAD = "[run]\nnum_batches = 10\n[sampling]\nmax_turn_tokens = 16\nmax_tokens = 64\n[schedule]\n"


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        (
            "max_tokens = {steps = [[4, 16]]}",
            ["schedule, batch 4: sampling.max_turn_tokens is 16 and sampling.max_tokens is 16", "a turn must be shorter"],
        ),
        (
            "max_tokens = {shape = 'linear', to = 5, start = 2}",
            ["schedule, batch 9: sampling.max_turn_tokens is 16 and sampling.max_tokens is 12"],
        ),
        ("max_turn_tokens = {steps = [[7, 64]]}", ["schedule, batch 7: sampling.max_turn_tokens is 64"]),
        ("max_turn_tokens = {steps = [[7, -3]]}", ["schedule, batch 7: sampling.max_turn_tokens would be -3", "equal to 1"]),
        ("temperature = {steps = [[7, 0]]}", ["schedule, batch 7: sampling.temperature is 0: greedy tokens"]),
        ("temperature = {steps = [[7, 11]]}", ["schedule, batch 7: sampling.temperature would be 11"]),
        ("temperature = {shape = 'linear'}", ["schedule.temperature.to is not set", "give the value at the end"]),
        ("max_tokens = {steps = [[3, 70.5]]}", ["schedule.max_tokens has the value 70.5", "give whole numbers"]),
        ("max_tokens = {steps = [[3, 99999]]}", ["rollout.max_total_tokens is 65536", "sampling.max_tokens is 99999"]),
        ("max_tokens = {steps = [[0, 70]]}", ["schedule.max_tokens.steps.0.0 is 0", "greater than or equal to 1"]),
        ("max_tokens = {steps = [[4, 70], [4, 80]]}", ["steps are at the batches [4, 4]", "give each once, in order"]),
        ("max_tokens = {shape = 'steps'}", ["shape is 'steps' and steps are []", "give steps = [[BATCH, VALUE], ...]"]),
        ("max_tokens = {shape = 'linear', steps = [[4, 70]]}", ["shape is 'linear'", "leave steps out, or shape"]),
        ("max_tokens = {steps = [[4, 70]], to = 9}", ["to is 9.0 with shape 'steps'", "remove it"]),
        ("learning_rate = {shape = 'cosine', decay = 3}", ["decay is 3 with shape 'cosine'", "belongs to shape constant"]),
        ("learning_rate = {shape = 'constant', start = 3}", ["start is 3 with shape 'constant'", "linear or cosine"]),
        ("max_tokens = {steps = [[4, 70]], to = 0}", ["to is 0.0 with shape 'steps'", "remove it"]),
        ("learning_rate = {shape = 'constant', to = 1e-7}", ["to is 1e-07 with shape 'constant' and without decay"]),
        ("learning_rate = {shape = 'constant', warmup = 3, end = 8}", ["end is 8", "give decay, the batches over which"]),
        ("temperature = {shape = 'constant', warmup = 3}", ["schedule.temperature.warmup is 3", "only a learning rate"]),
        (
            "learning_rate = {shape = 'cosine', end = 5}",
            ["schedule, batch 5: learner.learning_rate would be 0", "schedule.learning_rate.to"],
        ),
        ("learning_rate = {steps = [[5, -1e-6]]}", ["schedule, batch 5: learner.learning_rate would be -1e-06"]),
        (
            "learning_rate = {shape = 'cosine', warmup = 10}",
            ["schedule.learning_rate changes from batch 10 to batch 10", "leave room for each part"],
        ),
        (
            "learning_rate = {shape = 'constant', warmup = 6, decay = 5}",
            ["changes from batch 5 to batch 10", "a warm-up of 6"],
        ),
        ("learning_rate = {shape = 'line'}", ["schedule.learning_rate.shape is 'line'", "'linear'"]),
        ("eps_low = {steps = [[3, 0.5]]}", ["schedule, batch 3", "eps_low is 0.5", "nothing would ever be clipped"]),
        ("eps_high = {steps = [[3, 0]]}", ["schedule, batch 3", "eps_high is 0"]),
        ("max_length = {steps = [[3, 70]]}", ["schedule.max_length: unknown key"]),
        ("max_tokens = {steps = [[3, 70]], form = 3}", ["schedule.max_tokens.form: unknown key", "shape"]),
        ("max_tokens = 70", ["schedule.max_tokens is 70", "Schedule"]),
        (
            "learning_rate = {shape = 'linear'}\n[learner]\nwarmup_steps = 5",
            ["learner.warmup_steps is 5", "set learner.warmup_steps = 0"],
        ),
        (
            "eps_low = {shape = 'linear', to = 1e-4}\n[objective]\nadaptive_clip_target = 0.2",
            ["objective.adaptive_clip_target is 0.2 and the clip width is scheduled"],
        ),
        (
            "max_tokens = {steps = [[3, 40]]}\n[objective]\noverlong_buffer_tokens = 50",
            ["schedule, batch 3: objective.overlong_buffer_tokens is 50 and sampling.max_tokens would be 40"],
        ),
    ],
)
def test_a_refusal_names_the_batch_the_value_and_the_way_out(schedule: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(HEAD + schedule + "\n")
    with pytest.raises(ConfigurationError) as refused:
        load_settings(file, [], {})
    message = str(refused.value)
    assert message.startswith(str(file))
    missing = [part for part in parts if part not in message]
    assert not missing, message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("schedule", "batch"),
    [
        ("max_tokens = {shape = 'linear', to = 40, end = 60}\nmax_turn_tokens = {steps = [[10, 50], [70, 16]]}", 59),
        ("max_tokens = {shape = 'linear', to = 40, end = 90}\nmax_turn_tokens = {steps = [[10, 50], [70, 16]]}", 69),
    ],
)
def test_a_few_batches_of_a_hundred_thousand_are_found(schedule: str, batch: int, tmp_path: Path) -> None:
    """A turn has 50 tokens from batch 10 to 69, and at the end of that the whole sequence has no more."""
    file = tmp_path / "run.toml"
    file.write_text(HEAD.replace("num_batches = 10", "num_batches = 100_000") + schedule + "\n")
    with pytest.raises(ConfigurationError, match=f"schedule, batch {batch}: sampling.max_turn_tokens is 50"):
        load_settings(file, [], {})


def test_a_run_that_grows_beyond_a_filter_of_long_answers_may_have_it_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(HEAD + "max_tokens = {steps = [[3, 128]]}\n[objective]\noverlong_filter_tokens = 128\n")
    assert load_settings(file, [], {}).objective.overlong_filter_tokens == 128
