"""Functions of verl and TRL in a project that is tried: unchanged, through the environment loop."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_services.prepare.env_try.command import main

PROMPT = [{"role": "user", "content": "2 + 2?"}]
ROW = {
    "data_source": "math_dapo", "prompt": PROMPT, "extra_info": {"index": 7}, "ground_truth": "four",
    "reward_model": {"ground_truth": "four"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "options", "reward"),
    [
        ("compute_score", {"reward_form": "verl"}, 1.0),
        # As many as are trained on: those of "four", and the one that ends the turn.
        ("by_tokens", {"reward_form": "trl"}, None),
        ("by_column", {"reward_form": "trl", "task_columns": ["ground_truth"]}, 0.0),
    ],
)
def test_a_function_of_another_trainer_is_called_as_there(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, options: dict[str, Any],
    reward: float | None,
) -> None:  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    shown = {
        "train_path": str(tmp_path / "rows.jsonl"), "prompt_column": "prompt", "answer_column": "", "system_prompt": "",
        "reward": f"tests.support.rewards.foreign:{function}", "reward_deadline_s": 60, **options,
    }  # fmt: skip
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in shown.items())
    config = tmp_path / "my.toml"
    config.write_text(f'[model]\npath = "{chat_model}"\n[environment]\nname = "dataset"\n[environment.options]\n{lines}\n')
    status = main([str(config), "--answer", "four", "--json", "--index", "0"])
    said = capsys.readouterr()
    assert status == 0, said
    episode = json.loads(said.out)
    if reward is None:
        (trained,) = [run for run in episode["sequences"][0] if run["use"] == "trained"]
        reward = float(len(trained["token_ids"]))
    assert episode["reward"] == reward, episode
