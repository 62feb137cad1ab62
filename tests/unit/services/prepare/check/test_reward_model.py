"""``gspo check`` of a reward model: by its files, without loading it."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_services.prepare.check.findings import Finding
from tests.support.checking.projects import Project

GOOD = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def findings_of(project: Project, config: Any) -> list[Finding]:
    """Of a project whose rows have no answer, with a reward model of this config.json; None: there is no model."""
    folder = project.folder / "rm"
    project.option(reward="", answer_column="")
    if config is not None:
        folder.mkdir()
        for name, text in {"config.json": json.dumps(config), "model.safetensors": "", "tokenizer.json": "{}"}.items():
            (folder / name).write_text(text)
        project.keys["reward.model"] = str(folder)
    return project.findings()


def test_a_classifier_with_one_output_is_as_it_should_be(project: Project) -> None:
    findings = findings_of(project, GOOD)
    assert [finding for finding in findings if finding.status in ("warn", "fail")] == []
    (found,) = [finding for finding in findings if finding.check == "reward model"]
    assert (found.status, "one output" in found.text) == ("ok", True)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**GOOD, "id2label": {"0": "bad", "1": "good"}}, "has 2 outputs"),
        ({**GOOD, "architectures": ["Qwen3ForCausalLM"]}, "architectures is ['Qwen3ForCausalLM']"),
        (None, 'has no reward of its own, and reward.model is ""'),
    ],
)
def test_what_is_no_reward_model_is_the_one_failure(project: Project, config: Any, text: str) -> None:
    (failure,) = [finding for finding in findings_of(project, config) if finding.status == "fail"]
    assert text in failure.text


def test_a_directory_that_is_not_there_is_no_fault_of_a_run_elsewhere(project: Project, tmp_path: Path) -> None:
    project.keys["reward.model"] = str(tmp_path / "nowhere")
    (failure,) = [finding for finding in project.findings(code=False) if finding.status == "fail"]
    assert "nowhere: there is no such directory" in failure.text
    assert [finding for finding in project.findings(code=False, elsewhere=True) if finding.status == "fail"] == []
