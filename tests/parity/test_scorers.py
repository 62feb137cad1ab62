"""The scores in tests/support/files/public_forms.py are those of the scorers that others publish."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from math_verify import parse, verify

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import create_environment
from tests.support.files.public_forms import FORMS

pytestmark = pytest.mark.parity


def by_math_verify(gold: str, text: str) -> float:
    """As its own page recommends."""
    return float(verify(parse(f"\\boxed{{{gold}}}"), parse(text)))


def by_trl(gold: str, text: str) -> float:
    from trl.rewards import accuracy_reward

    (score,) = accuracy_reward(completions=[[{"role": "assistant", "content": text}]], solution=[f"${gold}$"])
    assert score is not None
    return float(score)


def by_skywork(gold: str, text: str) -> float:
    """Any of the row's answers, as verl/workers/reward_manager/hf_math_verify.py of SkyworkAI/Skywork-OR1 compares."""
    return max(by_math_verify(each, text) for each in (gold, str(int(gold) + 100)))


def by_verl(name: str) -> Callable[[str, str], float]:
    """A module of verl's scorers, without the package around it, which would load ray."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "utils" / "reward_score" / f"{name}.py"
    loader = SourceFileLoader(f"verl_{name}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)

    def score(gold: str, text: str) -> float:
        value: Any = module.compute_score(text, gold)
        # DAPO's scores are 1 and -1; "acc" says whether the answer is right.
        return float(value["acc"] if isinstance(value, dict) else value)

    return score


def scorer_of(name: str) -> Callable[[str, str], float]:
    known = {"math-verify": by_math_verify, "trl": by_trl, "math-verify, any": by_skywork}
    return by_verl(name.removeprefix("verl ")) if name.startswith("verl ") else known[name]


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.scorer])
def test_a_form_is_scored_as_its_own_scorer_does(name: str) -> None:
    form = FORMS[name]
    score_of = scorer_of(form.scorer)
    for row, text, score in form.answers():
        assert score_of(form.gold(row), text) == score, (row, text)


@pytest.mark.parametrize(("name", "text"), [("verl GSM8K", "It is 7."), ("DAPO", "It is 7.")])
def test_where_we_differ_an_answer_without_its_marker_counts_here_and_not_there(
    name: str, text: str, tmp_path: Path
) -> None:
    """verl's scorers teach the marker, too; ours compares what is said."""
    assert scorer_of(FORMS[name].scorer)("7", text) == 0.0
    environment = create_environment("dataset", {"train_path": str(FORMS[name].written(tmp_path))})
    job = environment.step(environment.start(environment.tasks("train").task(0), 0).state, text).reward
    assert isinstance(job, RewardJob)
    module, _, function = job.function.partition(":")
    value = getattr(importlib.import_module(module), function)(**job.arguments)
    assert (value["right"] if isinstance(value, dict) else value) == 1.0
