"""The hooks of .pre-commit-config.yaml: they run from the environment, offline, and stop a bad commit."""

import os
import re
import subprocess
from pathlib import Path

import yaml

from tests.support.judges import BIN, ROOT, objections

CONFIG = ROOT / ".pre-commit-config.yaml"
BAD = {
    "badly_formatted.py": "x=1\n",
    "unused.py": "import os\n",
    "id_key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n",
    "large.bin": "x" * 700_000,
    ".github/workflows/bad.yml": "on: push\njobs: {a: {runs-on: ubuntu-24.04, steps: [{rum: true}]}}\n",
}


def test_the_configuration_is_valid() -> None:
    assert objections("pre-commit", "validate-config", CONFIG) == ""


def test_no_hook_fetches_anything_and_each_runs_what_setup_installs() -> None:
    repositories = yaml.safe_load(CONFIG.read_text())["repos"]
    assert {repository["repo"] for repository in repositories} == {"local"}
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    programs = {
        word.removeprefix(".venv/bin/") for hook in hooks for word in re.findall(r"\.venv/bin/[\w-]+", hook["entry"])
    }
    assert programs > {"ruff", "mypy", "lint-imports", "actionlint"}
    assert [program for program in programs if not (BIN / program).exists()] == []


def test_a_commit_with_faults_is_refused_hook_by_hook_and_a_good_one_is_taken(tmp_path: Path) -> None:
    hidden = ("GIT_", "PRE_COMMIT", "SKIP")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    who = {f"GIT_{role}_{what}": "x@y" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment |= {"PRE_COMMIT_HOME": str(tmp_path / "home"), "GIT_CONFIG_GLOBAL": os.devnull, **who}
    folder = tmp_path / "project"

    def run(*words: str | Path, status: int = 0) -> str:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / "bin").symlink_to(BIN)
    (folder / ".pre-commit-config.yaml").write_text(CONFIG.read_text())
    (folder / ".gitignore").write_text(".venv\n")
    run("git", "init", "--quiet")
    run(BIN / "pre-commit", "install")
    run("git", "add", ".")
    run("git", "commit", "--quiet", "--message", "good")
    for name, content in BAD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    run("git", "add", ".")
    said = run("git", "commit", "--quiet", "--message", "bad", status=1)
    failed = re.findall(r"^(.+?)\.{3,}Failed$", said, re.MULTILINE)
    assert failed == ["ruff check", "ruff format", "actionlint", "no large files", "no private keys"], said
