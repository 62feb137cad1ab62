"""`gspo setup`: the commands are those of the Makefile, and what keeps it from installing is said."""

import os
import re
import shlex
import subprocess
import sys
import venv
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def setup(*words: str, python: Path = Path(sys.executable), **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'names'}:{ROOT}", **variables}
    command = [python, "-m", "gspo_services.cli.main", "setup", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def installs(text: str) -> list[tuple[set[str], str]]:
    """Of each installation from lists: flags and variables, and the list. Those of the development tools are left out."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line)
        options = {word for word in words if word.startswith(("--no-", "--require-", "DS_"))}
        found += [(options, Path(name).name) for flag, name in pairwise(words) if flag == "-r"]
    return [each for each in found if each[1] != "dev.txt"]


@pytest.mark.parametrize(("target", "words"), [("VENV", []), ("GPU", ["--gpu"])])
def test_it_installs_what_the_makefile_installs_in_the_same_way(target: str, words: list[str]) -> None:
    (recipe,) = re.findall(rf"^\$\({target}\)/\.installed:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    recipe = re.sub(r"\$\(if \$\(TORCH\),\$\(PIP\) \$\(TORCH\),(.*?) \|\| .*", r"\1", recipe)
    wanted = installs(
        "\n".join(
            line.strip().replace("$(LOCKED)", "--no-deps --require-hashes")
            for line in recipe.splitlines()
            if "-r requirements/" in line
        )
    )
    printed = setup("--print", *words)
    assert installs(printed.stdout) == wanted
    assert len(wanted) == len(printed.stdout.splitlines())
    lists = [Path(word) for word in printed.stdout.split() if word.endswith(".txt")]
    assert lists == [ROOT / "requirements" / path.name for path in lists]


def test_without_pip_it_says_how_to_get_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = setup(python=tmp_path / "bare" / "bin" / "python")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'bare'} has no pip: add it with" in done.stderr


def test_a_command_that_fails_is_named_and_the_next_one_is_not_run(tmp_path: Path) -> None:
    venv.create(tmp_path / "new", with_pip=True)
    done = setup(python=tmp_path / "new" / "bin" / "python", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("$")] == [
        f"$ {line}" for line in setup("--print", python=tmp_path / "new" / "bin" / "python").stdout.splitlines()[:1]
    ]
    assert "gspo setup: failed, and the rest was not tried: " in done.stderr
    assert done.stderr.strip().endswith("requirements/torch.txt")
