"""``gspo check`` of a teacher: by its files, without loading it. The learner's own start refuses the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from gspo_services.learner.__main__ import _require_trainable
from gspo_services.learner.start import log_expected_memory, require_teacher
from gspo_services.prepare.check.findings import Finding
from gspo_services.shared.estimates import shape_of
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, opened_paths
from tests.support.checking.projects import Project, gpus, write_weights
from tests.support.checking.shapes import QWEN3_8B, TINY
from tests.support.teacher.played_teacher import played_teacher, sound

GIB = 2**30


@pytest.fixture
def teacher(project: Project) -> Path:
    """Another model with the tokenizer of the project's."""
    folder = project.folder / "teacher"
    shutil.copytree(project.model, folder)
    project.keys["distillation.teacher"] = str(folder)
    return folder


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def failures(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "fail"]


def test_a_teacher_with_the_policys_tokens_is_as_it_should_be(project: Project, teacher: Path) -> None:
    configure(teacher, vocab_size=project.vocabulary + 64)
    findings = project.findings()
    assert [finding for finding in findings if finding.status in ("warn", "fail")] == []
    (found,) = [finding for finding in findings if finding.check == "teacher"]
    assert (found.status, "beside the rewards, times 1" in found.text) == ("ok", True)


def smaller(folder: Path, size: int) -> str:
    configure(folder, vocab_size=size - 8)
    return rf"its vocabulary \(vocab_size\) is {size - 8} and the policy's {size}"


def other_tokenizer(folder: Path, size: int) -> str:
    path = folder / "tokenizer.json"
    plain = json.loads(path.read_text())
    plain["model"]["vocab"]["seven"] = place = plain["model"]["vocab"].pop("7")
    number = 1 + max(*plain["model"]["vocab"].values(), *(each["id"] for each in plain["added_tokens"]))
    plain["added_tokens"].append({**plain["added_tokens"][0], "id": number, "content": "<think>"})
    path.write_text(json.dumps(plain))
    sizes = f"its tokenizer has {number + 1} tokens and the policy's {number}"
    return f"{sizes}; the first that differs has id {place}: 'seven' there, '7' here"


def no_tokenizer(folder: Path, size: int) -> str:
    (folder / "tokenizer.json").unlink()
    return "teacher/tokenizer.json: no such file"


def broken_tokenizer(folder: Path, size: int) -> str:
    (folder / "tokenizer.json").write_text("{}")
    return "teacher/tokenizer.json: not a tokenizer"


def no_model(folder: Path, size: int) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def few_positions(folder: Path, size: int) -> str:
    configure(folder, max_position_embeddings=48)
    return "it has 48 positions and sampling.max_tokens is 64; lower it to 48"


BREAKS = [smaller, other_tokenizer, no_tokenizer, broken_tokenizer, no_model, few_positions]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_what_cannot_score_the_policys_tokens_is_the_one_failure(
    project: Project, teacher: Path, broken: Callable[[Path, int], str]
) -> None:
    text = broken(teacher, project.vocabulary)
    (failure,) = failures(project.findings(code=False))
    situation = project.situation()
    with pytest.raises(ValueError, match=text) as refused:
        require_teacher(situation.settings, situation.model_path)
    assert str(refused.value).startswith(f"distillation.teacher is {teacher}: ")
    assert failure.text == str(refused.value) or (broken is no_model and "config.json" in failure.text)


def test_a_teacher_that_is_not_there_is_no_fault_of_a_run_elsewhere(project: Project, teacher: Path) -> None:
    (teacher / "model.safetensors").unlink()
    (failure,) = failures(project.findings(code=False))
    assert "teacher has no weights" in failure.text
    shutil.rmtree(teacher)
    (failure,) = failures(project.findings(code=False))
    assert "teacher: there is no such directory" in failure.text
    assert failures(project.findings(code=False, elsewhere=True)) == []


def test_a_teacher_is_whole_on_each_rank_and_takes_its_time(project: Project, teacher: Path) -> None:
    (teacher / "config.json").write_text(json.dumps(QWEN3_8B))
    write_weights(teacher / "model.safetensors", 8)
    found = {finding.check: finding for finding in project.findings(gpus("H100", 2), code=False)}
    size = 4 * shape_of(QWEN3_8B).parameters
    assert f"teacher {size / GIB:.0f} GiB" in found["learner memory"].text
    assert any(row.split()[0] == "teacher" for row in found["memory of a rank"].text.splitlines())
    with_it = found["speed"].text
    del project.keys["distillation.teacher"]
    without = {finding.check: finding for finding in project.findings(gpus("H100", 2), code=False)}
    assert with_it != without["speed"].text
    with capture_logs() as lines:
        log_expected_memory(TINY, Settings.model_validate({"distillation": {"teacher": str(teacher)}}), "cuda")
    (row,) = [line for line in lines if line["what"] == "teacher"]
    assert float(row["device"]) == pytest.approx(size / GIB, rel=0.02)


def test_settings_that_contradict_a_teacher_are_refused_and_those_without_one_named(project: Project) -> None:
    with pytest.raises(ValueError, match=r"only is true and distillation.teacher is empty: nothing would be trained"):
        Settings.model_validate({"distillation": {"only": True}})
    with pytest.raises(ValueError, match=r"dynamic_sampling is true and distillation.teacher is '/t'"):
        Settings.model_validate({"distillation": {"teacher": "/t"}, "data": {"dynamic_sampling": True}})
    with pytest.raises(
        ValueError, match=r"rest_after_groups is 2 and distillation.teacher is '/t'.* leave rest_after_groups"
    ):
        Settings.model_validate({"distillation": {"teacher": "/t"}, "data": {"rest_after_groups": 2}})
    with pytest.raises(
        ValueError, match=r'rest_after_groups is 2 and objective.kl_in is "reward".*their tasks may not rest'
    ):
        Settings.model_validate({"objective": {"kl_coefficient": 0.1, "kl_in": "reward"}, "data": {"rest_after_groups": 2}})
    project.keys["distillation.coefficient"] = 0.5
    unused = [finding.text for finding in project.findings(code=False) if finding.check == "unused"]
    assert "distillation.coefficient: distillation.teacher is not set" in unused
    project.keys |= {"distillation.teacher": "/t", "distillation.only": True, "objective.std_over": "batch"}
    unused = [finding.text for finding in project.findings(code=False) if finding.check == "unused"]
    assert unused == ["objective.std_over: distillation.only: rewards train nothing"]


def test_only_the_learner_opens_the_teacher() -> None:
    settings = Settings.model_validate({"distillation": {"teacher": "/models/large"}})
    opened = {
        process: {path.path for path in opened_paths(settings, process)} for process in ("broker", "rollout", "learner")
    }  # type: ignore[arg-type]
    assert [process for process, paths in opened.items() if "/models/large" in paths] == ["learner"]


def test_a_served_teacher_is_asked_for_its_tokens_and_one_that_is_away_is_a_failure_here_only(project: Project) -> None:
    tokenizer = Tokenizer.from_file(str(project.model / "tokenizer.json"))
    with played_teacher() as server:
        project.keys["distillation.teacher"] = server.url
        server.text = lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
        (found,) = [finding for finding in project.findings(code=False) if finding.check == "teacher"]
        assert (found.status, found.text) == ("ok", f"{server.url} has the policy's tokens and scores 64 at once")
        seven = tokenizer.token_to_id("7")
        server.text = lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False).replace("7", "seven")
        (failure,) = failures(project.findings(code=False))
        assert f"has id {seven}: 'seven' there, '7' here" in failure.text
    (failure,) = failures(project.findings(code=False))
    assert f"the teacher at {server.url} does not answer (ConnectionRefusedError" in failure.text
    assert failures(project.findings(code=False, elsewhere=True)) == []


def test_a_served_teacher_must_take_the_longest_sequence_that_the_schedule_gives(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(project.model / "tokenizer.json"))
    with played_teacher() as server:
        project.keys |= {"distillation.teacher": server.url, "schedule.max_tokens": {"steps": [[3, 96]]}}
        server.text = lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
        server.answer = lambda ids: sound(ids) if len(ids) < 90 else (400, b"the maximum allowed length is 90 tokens")
        for elsewhere in (False, True):
            (failure,) = failures(project.findings(code=False, elsewhere=elsewhere))
            text = "distillation.teacher: sequences may have 96 tokens"
            assert failure.text.startswith(text)
            assert "the maximum allowed length is 90 tokens" in failure.text
        monkeypatch.setenv("WORLD_SIZE", "2")  # As torchrun starts the ranks: one of them asks.
        monkeypatch.setenv("RANK", "1")
        _require_trainable(project.situation().settings)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigurationError, match=text):
            _require_trainable(project.situation().settings)
        monkeypatch.delenv("RANK")
        with pytest.raises(ConfigurationError, match=text):
            _require_trainable(project.situation().settings)
        server.answer = sound
        _require_trainable(project.situation().settings)
        assert [len(ids) for ids in server.asked] == [96] * 5
