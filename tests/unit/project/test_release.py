"""`make release` refuses a commit that is not ready, and says what to do about it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.release import ROOT, ReleaseError, check_ready

CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-11-28\n\n- new\n"
HIDDEN = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
WHO = {f"GIT_{role}_{what}": "x@y" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *words: str) -> None:
    environment = {**HIDDEN, **WHO, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", *words], cwd=folder, env=environment, check=True, capture_output=True, timeout=60)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one commit, which may be released as 1.2.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "one")


def test_a_commit_with_its_section_is_ready_before_and_after_its_tag(project: Path) -> None:
    check_ready(project)
    git(project, "tag", "v1.2.0")
    check_ready(project)


def test_a_file_that_is_not_committed_is_named(project: Path) -> None:
    (project / "new.py").write_text("")
    with pytest.raises(ReleaseError, match=r"1 files are not as committed, such as new\.py"):
        check_ready(project)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (CHANGELOG.replace("1.2.0", "1.1.0"), "no section `## 1.2.0 - YYYY-MM-DD`"),
        (CHANGELOG.replace(" - 2026-11-28", ""), "no section `## 1.2.0 - YYYY-MM-DD`"),
        (
            CHANGELOG.replace("Unreleased\n", "Unreleased\n\n- newer\n"),
            "lines under Unreleased: move them",
        ),
    ],
)
def test_a_changelog_that_does_not_fit_is_refused(project: Path, changed: str, message: str) -> None:
    (project / "CHANGELOG.md").write_text(changed)
    commit(project)
    with pytest.raises(ReleaseError, match=message):
        check_ready(project)


def test_a_tag_that_contradicts_the_version_is_refused(project: Path) -> None:
    git(project, "tag", "v1.3.0")
    with pytest.raises(ReleaseError, match=r"has the tag v1\.3\.0, and pyproject\.toml says 1\.2\.0"):
        check_ready(project)
    git(project, "tag", "--delete", "v1.3.0")
    git(project, "tag", "v1.2.0")
    commit(project)
    with pytest.raises(ReleaseError, match=r"v1\.2\.0 is the tag of another commit: raise the version"):
        check_ready(project)


def test_make_release_refuses_before_it_makes_anything(tmp_path: Path) -> None:
    """With this project's own Makefile, in a repository where nothing is set up."""
    for name in ("Makefile", "pyproject.toml", "deploy/release.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.0.1 - 2026-01-01\n")
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    words = ["make", "release", f"PYTHON={sys.executable}"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "not ready for a release: CHANGELOG.md has no section" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        ".git",
        ".gitignore",
        "CHANGELOG.md",
        "Makefile",
        "deploy",
        "pyproject.toml",
    }
