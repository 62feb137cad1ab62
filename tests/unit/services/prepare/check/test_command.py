"""``gspo check`` as a command: its table, its JSON, its exit statuses, and worker processes that misbehave."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_services.prepare.check.code import CodeReport, CodeWorker
from gspo_services.prepare.check.command import main
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.report import as_json, summary
from gspo_services.prepare.check.tasks import code_findings
from gspo_services.shared.runtime.lifecycle import module_command
from tests.support.checking.projects import Project, write_weights
from tests.support.checking.shapes import QWEN3_8B, QWEN3_30B, TINY

ROOT = Path(__file__).parents[5]
OVERLAYS = ROOT / "deploy" / "k8s"
SEVERAL_TURNS = """
from gspo.tasks.environments import Environment, Start, Step

class Tasks:
    num_tasks = 1
    def task(self, index):
        return {}

class Talk(Environment):
    def tasks(self, split):
        return Tasks()
    def start(self, task, seed):
        return Start(state={}, messages=[{"role": "user", "content": "1"}])
    def step(self, state, action):
        BODY
"""


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("overlay", "config", "words"),
    [
        ("base/run.toml", TINY, ()),
        ("overlays/single-gpu-node/run.toml", QWEN3_8B, ("--gpu", "H100", "--gpus", "8")),
        ("overlays/qwen3-30b-a3b/run.toml", QWEN3_30B, ("--gpu", "H100", "--gpus", "24")),
    ],
)
def test_every_overlay_passes_with_the_models_config_alone(
    overlay: str, config: dict[str, Any], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(OVERLAYS / overlay), "--model", str(tmp_path), "--no-code", "--json", *words]) == 0
    findings = {finding["check"]: finding for finding in said(capsys)["findings"]}
    assert findings["architecture"]["status"] == findings["ranks"]["status"] == "ok"
    if "qwen3-30b" in overlay:
        assert findings["learner memory"]["status"] == findings["engine memory"]["status"] == "ok"
        # Sixteen ranks publish a version of 61 GB well within the deadline of 2 versions.
        assert (findings["lag"]["status"], findings["lag"]["basis"]) == ("ok", "estimated")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_passes_with_the_models_config_alone(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert main([str(example), "--model", str(tmp_path), "--elsewhere", "--no-code", "--json"]) == 0
    assert said(capsys)["status"] in ("ok", "note", "warn")


def test_the_command_opens_the_code_in_a_process_and_shows_a_table(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("60", "130"):
        monkeypatch.setenv("COLUMNS", width)
        command = module_command("gspo_services.prepare.check.command", str(project.config), "--verbose")
        done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.stderr == ""
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= int(width)
        assert "an echo of task 0 gets" in " ".join(done.stdout.split())
        assert done.stdout.rstrip().endswith("it can work")
        if width == "60":
            # The second time without the tokenizer, the tasks and the code.
            project.keys["sampling.max_turn_tokens"] = 7
    assert not list(project.folder.glob("run/*"))


def test_a_dozen_lines_say_that_all_is_well_and_each_problem_has_its_own(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([str(project.config), "--no-code"]) == 0
    well = capsys.readouterr().out
    assert len(well.splitlines()) <= 24  # Two of them are the title, a long path.
    assert all(check in well for check in ("time", "memory", "also ok: ranks, weights, objective"))
    assert main([str(project.config), "--no-code", "--set", "learner.expert_parallel=3"]) == 1
    wrong = " ".join(capsys.readouterr().out.split())
    assert "fail ranks read" in wrong
    assert "also ok: ranks" not in wrong


def test_nothing_of_torch_or_an_engine_is_imported() -> None:
    """All of the command but the worker is imported in the time of a light program."""
    program = (
        "import sys, gspo_services.prepare.check.command, gspo_services.prepare.check.worker;"
        "print([name for name in ('torch', 'transformers', 'deepspeed', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def test_status_one_is_for_what_cannot_work_and_two_for_what_cannot_be_read(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(project.config)
    assert main([config, "--no-code", "--json"]) == 0
    assert said(capsys)["status"] in ("ok", "note")
    assert main([config, "--no-code", "--json", "--set", "learner.expert_parallel=3"]) == 1
    assert said(capsys)["status"] == "fail"
    assert main([config, "--set", "batch.max_leg=1"]) == 2
    assert "did you mean 'max_lag'?" in capsys.readouterr().err
    assert main([config, "--json", "--set", "batch.max_leg=1"]) == 2
    (finding,) = said(capsys)["findings"]
    assert "did you mean 'max_lag'?" in finding["text"]
    assert main([config, "--no-code", "--gpu", "GTX 280"]) == 2
    assert "use A100, H100" in capsys.readouterr().err
    assert main([config, "--no-code", "--gpus", "2"]) == 2
    assert "--gpu H100" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--gpus", "0"], ["--gpus", "many"], ["--timeout", "-1"], ["--timeout", "soon"], ["--here", "--elsewhere"]]
)
def test_a_wrong_option_is_refused_with_what_is_expected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run.toml", *words])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err or "--here" in words


def test_code_that_hangs_is_killed_with_what_it_has_started(project: Project) -> None:
    (project.folder / "hanging.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '600'])\nsubprocess.run(['sleep', '600'])\n"
    )
    project.keys |= {"environment.name": "hanging:Environment", "environment.options": {}}
    worker = CodeWorker(project.situation())
    try:
        report = worker.finish(5.0)
    finally:
        worker.close()
    (found,) = [finding for finding in code_findings(project.situation(), report) if finding.status == "fail"]
    assert "not done after 5 s" in found.text
    assert 'environment "hanging:Environment"' in found.text
    # What was found before is not lost.
    assert report.part("tokenizer") is not None


def test_code_that_hangs_ends_with_the_check_however_that_ends(project: Project) -> None:
    (project.folder / "waiting.py").write_text("import threading\nthreading.Event().wait()\n")
    project.keys |= {"environment.name": "waiting:Environment", "environment.options": {}}
    worker = CodeWorker(project.situation())
    try:
        while b"waiting:Environment" not in worker._process.receive(60.0):
            pass
        worker._process._connection.close()
        assert worker._process.status(60.0) is not None
    finally:
        worker.close()


def test_code_that_ends_its_process_is_named(project: Project) -> None:
    (project.folder / "ending.py").write_text("import os\nprint('before', flush=True)\nos._exit(7)\n")
    project.keys |= {"environment.name": "ending:Environment", "environment.options": {}}
    worker = CodeWorker(project.situation())
    try:
        report = worker.finish(60.0)
    finally:
        worker.close()
    (found,) = [finding for finding in code_findings(project.situation(), report) if finding.status == "fail"]
    assert found.text == 'environment "ending:Environment": its process ended with status 7 (before)'


def test_what_code_prints_is_no_report(project: Project) -> None:
    report = CodeReport(parts=[], end="", said='{"part": "code"}')
    assert list(code_findings(project.situation(), report)) == []


def test_an_error_of_an_environment_comes_with_its_line(project: Project) -> None:
    name = f"talk_{project.module}"
    (project.folder / f"{name}.py").write_text(SEVERAL_TURNS.replace("BODY", "return 1 / 0"))
    project.keys |= {"environment.name": f"{name}:Talk", "environment.options": {}, "evaluation.every_batches": 0}
    (found,) = [finding for finding in project.findings() if finding.status == "fail"]
    assert "ZeroDivisionError" in found.text
    assert f"{name}.py:15 in step" in found.text


def test_text_of_others_cannot_act_on_a_terminal(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.configure_model(architectures=["\x1b[2JForCausalLM"], layer_types=["\x1b]0;x\x07"])
    assert main([str(project.config), "--no-code"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b" in out
    finding = Finding(check="x", status="fail", text="\x1b[2J\u202e", way_out="y")
    assert as_json([finding], "a\x1b", "b").isascii()


def test_the_summary_counts_and_judges() -> None:
    fine = Finding(check="a", status="ok", text="")
    bad = Finding(check="b", status="warn", text="", way_out="do")
    assert summary([fine, fine]) == "2 ok: it can work"
    assert summary([fine, bad, bad]) == "1 ok, 2 warnings: it can run; read the warnings"
    assert summary([Finding(check="c", status="fail", text="", way_out="do")]) == "1 failure: it cannot work as it is"


def test_a_model_in_shards_is_counted_by_its_headers(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    whole = project.model / "model.safetensors"
    elements = 256_384 + 2 * 64 * (project.vocabulary - 264)
    whole.unlink()
    write_weights(project.model / "model-1.safetensors", 1000, "BF16")
    write_weights(project.model / "model-2.safetensors", elements - 1000, "BF16")
    assert main([str(project.config), "--no-code", "--json"]) == 0
    (found,) = [finding for finding in said(capsys)["findings"] if finding["check"] == "weights"]
    assert found["text"] == f"{elements:,} elements, bfloat16"
