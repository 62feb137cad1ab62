"""Rows as they are published go through ``gspo check``, ``gspo env try`` and an evaluation, scored as their owners do."""

import json
from collections.abc import AsyncGenerator, Mapping

import numpy as np
import pytest

from gspo_protocol.messages import VersionRun
from gspo_services.prepare.env_try.command import main as env_try
from gspo_services.rollout.sglang import GenerateRequest, OutputPiece
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.runs.eval.sample_maker import open_maker
from gspo_services.runs.eval.samples import ScoredSample
from gspo_services.runs.eval.sets import open_set
from gspo_services.runs.local_play import VERSION
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.settings import EvaluationSet, load_settings
from tests.support.checking.projects import Project
from tests.support.files.public_forms import FORMS, NUM_ROWS

EVERY_CONVENTION = "So it is $\\boxed{7}$.\n#### 7\nAnswer: 7"


@pytest.fixture
def published(project: Project) -> Project:
    """Trains on all forms, each a source."""
    sources = [{"path": str(form.written(project.folder / name)), "name": name} for name, form in FORMS.items()]
    project.keys["environment.options"] = {"sources": sources, "eval_path": sources[0]["path"]}
    project.keys |= {"sampling.max_turn_tokens": 200, "sampling.max_tokens": 2000, "evaluation.num_tasks": 2}
    return project


def test_check_says_how_each_source_is_laid_out_and_what_counts_once(published: Project) -> None:
    findings = {finding.check: finding for finding in published.findings()}
    assert findings["train tasks"].text.startswith(f"{NUM_ROWS * len(FORMS)}, ")
    said = findings["train rows"].text
    assert [form.layout for form in FORMS.values() if form.layout not in said] == []
    assert said.endswith(f"; {2 * NUM_ROWS} rows are there already and count once")
    assert findings["eval rows"].text == f"laid out as {FORMS['verl GSM8K'].layout}"


def test_env_try_scores_the_first_row_of_each_form(published: Project, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(published.config), "--answer", EVERY_CONVENTION, "--tasks", str(NUM_ROWS * len(FORMS)), "--json"]
    assert env_try(words) == 0
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    assert rewards == [1.0, *[0.0] * (NUM_ROWS - 1)] * len(FORMS)


class Scripted:
    """Says for each task what a test wants, in the order in which tasks are sampled."""

    def __init__(self, tokenizer: ChatTokenizer, said: Mapping[str, str]) -> None:
        """``said``: the answer by a part of the prompt."""
        self._tokenizer = tokenizer
        self._said = said

    async def stop_generating(self) -> None:
        """Nothing lasts."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        prompt = self._tokenizer.decode(list(request.input_ids))
        (text,) = [answer for part, answer in self._said.items() if part in prompt]
        ids = np.array([*self._tokenizer.encode(text), min(self._tokenizer.stop_ids)], dtype=np.int32)
        yield OutputPiece(
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            version_runs=[VersionRun(VERSION, len(ids))],
            finish_reason="stop",
        )


async def test_an_evaluation_scores_answers_as_the_owners_of_the_rows_do(published: Project) -> None:
    settings = load_settings(published.config, (), {})
    (published.folder / "run" / "logs").mkdir(parents=True)
    chosen = open_set(settings, "published", EvaluationSet(split="train"))
    tokenizer, taken = ChatTokenizer(published.model), list[ScoredSample]()
    said, scores = dict[str, str](), dict[str, float]()
    for name, form in FORMS.items():
        # Rows 0 and 1 get a right answer each, the others those that are wrong, or right in another spelling.
        for row, text in enumerate([form.right.format(form.gold(row)) for row in range(2)]):
            said[f"{name} {row}:"], scores[f"{name} {row}:"] = text, 1.0
        for row in range(2, NUM_ROWS):
            said[f"{name} {row}:"], scores[f"{name} {row}:"] = form.right.format(form.gold(row + 1)), 0.0
    async with open_maker(chosen, tokenizer, Scripted(tokenizer, said), MonotonicClock()) as maker:
        await maker.take(iter([(task, 0) for task in chosen.tasks]), taken.append)
    seen = {key: sample.reward for sample in taken for key in said if key in json.dumps(chosen.tasks[sample.task].task)}
    assert seen == scores
