"""What the README shows works as it stands there."""

import itertools
import math
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import torch

from services.runtime.settings import Settings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def block(heading: str, first_line: str) -> str:
    """The indented block of a section that begins with a line."""
    lines = README.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    begin = lines.index(f"    {first_line}")
    shown = itertools.takewhile(lambda line: not line or line.startswith("    "), lines[begin:])
    return textwrap.dedent("\n".join(shown))


def test_the_loss_alone_gives_the_gradient_of_the_formula() -> None:
    """Two groups of two sequences, two action tokens each; one nat in 10,000 above the engine."""
    names: dict[str, Any] = {
        "rewards": [1.0, 0.0, 0.0, 1.0],
        "group_ids": [0, 0, 1, 1],
        "logprobs_T": torch.full((12,), -1.0, requires_grad=True),
        "behaviour_logprobs_T": torch.full((12,), -1.0001),
        "mask_T": torch.tensor([False, True, True] * 4),
        "sequence_ids_T": torch.arange(4).repeat_interleave(3),
        "lag_S": torch.zeros(4),
    }
    exec(block("The loss alone", "from gspo.advantages import group_advantages, sequence_values_to_tokens"), names)
    advantage = 0.5 / math.sqrt(0.5)
    expected = math.exp(1e-4) * advantage / 2 / 4
    wanted = torch.tensor([[0.0, sign * expected, sign * expected] for sign in (-1.0, 1.0, 1.0, -1.0)]).reshape(-1)
    torch.testing.assert_close(names["logprobs_T"].grad, wanted, rtol=1e-5, atol=0.0)


def test_the_settings_of_your_model_and_your_data_are_accepted() -> None:
    settings = Settings.model_validate(tomllib.loads(block("Your model, your data", "[model]")))
    assert settings.learner.num_ranks == 8
    assert settings.environment.options["prompt_column"] == "question"
