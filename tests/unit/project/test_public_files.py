"""What a public project is expected to have: changelog, citation, security policy, forms."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from gspo_services.cli.command_line import command_line
from tests.support.judges import ROOT, objections_of_schema

GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_a_file_with_a_schema_fits_it(schema: str, files: list[Path], tmp_path: Path) -> None:
    assert objections_of_schema(schema, *files) == ""
    planted = tmp_path / "planted.yml"
    planted.write_text(re.sub(r"^\w+", "misspelt", files[0].read_text(), count=1, flags=re.MULTILINE))
    assert "misspelt" in objections_of_schema(schema, planted)


def test_a_bug_report_asks_for_what_the_commands_say() -> None:
    fields = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text())["body"]
    labels = " ".join(field["attributes"].get("label", "") for field in fields)
    asked = set(re.findall(r"`gspo (\w+)", labels))
    assert asked == {"check", "doctor"}
    assert asked <= set(command_line()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]


def test_the_version_has_a_dated_section_of_the_changelog_below_what_is_unreleased() -> None:
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(PROJECT['version'])} - \d{{4}}-\d\d-\d\d", sections[1])


def test_the_citation_is_of_this_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"], citation["keywords"]) == (
        PROJECT["version"], PROJECT["license"], PROJECT["keywords"],
    )  # fmt: skip
    assert f"## {citation['version']} - {citation['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_no_file_for_the_host_names_a_host_of_its_own() -> None:
    """The repository is whoever's it is: only actions and schemas have addresses."""
    texts = {path.name: path.read_text() for path in [*GITHUB.rglob("*.yml"), ROOT / "SECURITY.md", ROOT / "CITATION.cff"]}
    assert {name: found for name, text in texts.items() if (found := re.findall(r"github\.com/\S+", text))} == {}
