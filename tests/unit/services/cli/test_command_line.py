"""The command line itself: quick help, output that nobody reads, completion."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_services.cli.command_line import command_line
from gspo_services.cli.completion import SHELLS, completion_script
from gspo_services.cli.tool import lacking

ROOT = Path(__file__).parents[4]
HELP_MODULES = 100
"""With Python's own; a library brings hundreds. Counted, because seconds say how busy the machine is."""


def gspo(*words: str) -> list[str]:
    return [sys.executable, "-m", "gspo_services.cli.main", *words]


def test_help_loads_few_modules_and_no_library() -> None:
    program = (
        "import sys; bare = set(sys.modules); import gspo_services.cli.main as main; main.command_line();"
        "print(*(set(sys.modules) - bare))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    assert 10 < len(loaded) < HELP_MODULES, sorted(loaded)
    assert not {"pydantic", "structlog", "rich", "msgspec", "zmq", "asyncio", "numpy"} & set(loaded)


@pytest.mark.parametrize("words", ["--help", "environments", "completion bash", "check --settings examples/arithmetic.toml"])
def test_a_reader_that_leaves_early_is_no_error(words: str) -> None:
    command = f"{shlex.join(gspo(*words.split()))} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


def completed(script: str, *words: str) -> set[str]:
    """What bash completes after these words."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _gspo; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_and_their_options() -> None:
    script = completion_script(command_line(), "bash")
    assert completed(script, "gspo", "re") == {"replay", "requeue", "restore"}
    assert completed(script, "gspo", "run", "--") == {"--set", "--plain", "--quiet", "--help"}
    assert completed(script, "gspo", "track", "--t") == {"--to"}
    assert completed(script, "gspo", "plot", "runs/") == set(), "files are bash's own"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_in_every_shells_script(shell: str) -> None:
    script = completion_script(command_line(), shell)
    for name in ("run", "track", "check", "env", "doctor", "completion"):
        assert f" {name}" in script
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(("words", "lacks"), [(["check", "x.toml"], "structlog"), (["doctor", "runs/x"], "rich")])
def test_a_command_without_its_extra_names_it_in_one_line(words: list[str], lacks: str) -> None:
    # The process of a command inherits nothing but its environment: the module that it does not find is a broken one there.
    code = f"import sys, importlib.abc; sys.modules[{lacks!r}] = None; sys.argv[0] = 'gspo'\n"
    code += "from gspo_services.cli import main as m, tool\n"
    code += "m._become = lambda module, words: (sys.argv.__setitem__(slice(1, None), words), tool.main())[1]\n"
    code += f"sys.exit(m.main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"needs {lacks}, of the extra services, which is not installed here: pip install 'gspo[services]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_of_several_extras_that_of_the_whole_is_named_and_what_is_in_none_is_not_explained() -> None:
    assert "gspo[learner]" in lacking(ModuleNotFoundError(name="torch.nn"))
    assert "needs pyzmq" in lacking(ModuleNotFoundError(name="zmq"))
    assert lacking(ModuleNotFoundError(name="numpy")) == "this needs numpy, which is not installed here: pip install gspo"
    assert lacking(ModuleNotFoundError(name="my_reward")) == ""
