"""The workflows in .github: two judges find nothing, and each `make` in them is a target."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.judges import BIN, ROOT, objections, objections_of_schema

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+")


def jobs(text: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(text)["jobs"]


def commands(text: str) -> Iterator[str]:
    """The `run` of each step."""
    return (step["run"] for job in jobs(text).values() for step in job["steps"] if "run" in step)


def missing_targets(text: str) -> list[str]:
    """What a workflow asks make for and the Makefile does not have."""
    words = [word for run in commands(text) for made in re.findall(r"\bmake\b([^\n;&|]*)", run) for word in made.split()]
    return [word for word in words if "=" not in word and not word.startswith("-") and word not in TARGETS]


def judged(judge: str, *files: Path) -> str:
    if judge == "actionlint":
        return objections("actionlint", f"-shellcheck={BIN / 'shellcheck'}", "-pyflakes=", *files)
    return objections_of_schema("github-workflows", *files)


@pytest.mark.parametrize("judge", ["actionlint", "schema"])
def test_no_judge_objects_to_a_workflow(judge: str) -> None:
    assert len(WORKFLOWS) >= 3
    assert judged(judge, *WORKFLOWS) == ""


@pytest.mark.parametrize("judge", ["actionlint", "schema"])
@pytest.mark.parametrize(("right", "wrong"), [("timeout-minutes:", "timeout-minute:"), ("runs-on:", "run-on:")])
def test_each_judge_names_a_misspelt_key(judge: str, right: str, wrong: str, tmp_path: Path) -> None:
    planted = tmp_path / "tests.yml"
    planted.write_text((ROOT / ".github" / "workflows" / "tests.yml").read_text().replace(right, wrong))
    assert wrong.rstrip(":") in judged(judge, planted)


def test_actionlint_sees_what_a_schema_cannot(tmp_path: Path) -> None:
    planted = tmp_path / "tests.yml"
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    planted.write_text(
        text.replace("matrix.python }}", "matrix.pyhton }}").replace("make demo", 'make demo; echo "$A" | cd $B')
    )
    said = judged("actionlint", planted)
    assert 'property "pyhton" is not defined' in said
    assert "shellcheck" in said


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_asks_make_only_for_what_the_makefile_has(path: Path) -> None:
    assert missing_targets(path.read_text(encoding="utf-8")) == []


def test_a_target_that_is_not_there_is_named() -> None:
    text = "jobs: {a: {steps: [{run: 'make demo'}, {run: 'make -s tests IMAGES=cpu && make release-it'}, {uses: b}]}}"
    assert missing_targets(text) == ["tests", "release-it"]
    assert {"demo", "test", "images", "sbom"} < TARGETS


def test_the_tests_are_the_two_commands_of_the_readme() -> None:
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    shown = re.findall(r"^(make \w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert list(commands(text)) == shown[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_may_do_little_for_a_bounded_time(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("uses: ") == len(PINNED.findall(text)) > 0
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in jobs(text).values())
    writing = {name for job in jobs(text).values() for name, may in job.get("permissions", {}).items() if may == "write"}
    assert writing <= {"pages", "id-token"}
