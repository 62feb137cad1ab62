"""Commands of the documentation can be given: `gspo` by its own parsers, targets of make with their variables, modules."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import gspo.tasks.integrations
from tests.support.pages import PAGES, ROOT, Block, blocks, inline_code, name_of

MAKEFILE: Final = (ROOT / "Makefile").read_text(encoding="utf-8")
ELSEWHERE: Final = {
    "cd", "docker", "export", "git", "helm", "kind", "kubectl", "mkdir", "mv", "pip", "source", "sudo", "tar", ".",
}  # fmt: skip
"""Programs that are not ours."""
_ASSIGNMENT: Final = re.compile(r"[A-Z_]+=")
_LEFT_OUT: Final = re.compile(r"are required|expected at least|invalid [\w ]+: '(?:[A-Z]+|1)'")
"""What a parser says of a mention that names no file, or stands for many: `gspo track RUN --to NAME`."""
_PLACE: Final = re.compile(r"(?:examples|benchmarks|tests)/")


class Command(NamedTuple):
    place: str
    words: tuple[str, ...]
    whole: bool = True
    """False: a mention in the text, which may leave out what the command needs."""


def lines_of(block: Block) -> Iterator[str]:
    """Lines that are typed: those after a `$` of a console, and all of a script."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "bash":
            yield line
        elif line.startswith("$ "):
            yield line[2:]


def commands_of(line: str, place: str, *, whole: bool = True) -> Iterator[Command]:
    """The commands of a line, without the variables before them; also those that run in a pod."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|>")
    lexer.whitespace_split = True
    words: list[str] = []
    parts = [*lexer, ";"]
    for number, word in enumerate(parts):
        if set(word) <= set(";&|>"):
            if words:
                yield Command(place, tuple(words), whole)
            words = []
        elif (words or not _ASSIGNMENT.match(word)) and parts[number - 1] != ">":
            if word == "--" and words[0] == "kubectl":
                words = []
            else:
                words.append(word)


def shown() -> Iterator[Command]:
    for block in blocks("bash", "console"):
        for line in lines_of(block):
            yield from commands_of(line, block.place)
    for page in PAGES:
        for code in inline_code(page):
            if code.startswith(("gspo ", "make ", "python -m ")) and "..." not in code:
                yield from commands_of(code, name_of(page), whole=False)


def flags_of(words: tuple[str, ...]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--\w", word)}


def unknown_flags(words: tuple[str, ...], source: Path) -> str:
    """Flags that no module beside this one writes down: what cannot be started here is read."""
    files = source.parent.glob("*.py") if source.name in ("__main__.py", "command.py") else [source]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    if "from benchmarks.whole_runs import" in text:
        shared = (ROOT / "benchmarks" / "whole_runs.py").read_text(encoding="utf-8")
        text += "".join(re.findall(r'add_argument\(("--[\w-]+")', shared))
    return "".join(f"{source.stem} has no {flag}; " for flag in sorted(flags_of(words)) if f'"{flag}"' not in text)


def objection_to_make(words: tuple[str, ...]) -> str:
    given = [word for word in words[1:] if word != "-C" and words[words.index(word) - 1] != "-C"]
    named = {word.partition("=")[0] for word in given if "=" in word}
    targets = [word for word in given if "=" not in word]
    wrong = [f"no target {each}" for each in targets if not re.search(rf"^{re.escape(each)}:", MAKEFILE, re.MULTILINE)]
    wrong += [f"no variable {each}" for each in sorted(named) if f"$({each})" not in MAKEFILE]
    return "; ".join(wrong)


def objection_to_python(words: tuple[str, ...]) -> str:
    """A module that is started must be there with its flags; a file, too."""
    if words[1] != "-m":
        path = ROOT / words[1]
        return unknown_flags(words, path) if path.is_file() else ""
    name, arguments = words[2], words[3:]
    if name in ("venv", "pip", "pytest"):
        return ""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return f"no module {name}"
    if name.startswith("gspo_services.shared.sglang_cpu"):
        return ""  # Its flags are SGLang's.
    path = Path(spec.origin)
    return unknown_flags(arguments, path.with_name("__main__.py") if path.name == "__init__.py" else path)


def objection(command: Command) -> str:
    """What is wrong with a command of another program than `gspo`."""
    words = command.words
    program = Path(words[0]).name or words[0]
    if program == "make":
        return objection_to_make(words)
    if re.fullmatch(r"python[\d.]*", program):
        return objection_to_python(words)
    if program == "torchrun":
        if "gspo" in words:
            return objections_to_gspo([command._replace(words=words[words.index("gspo") :])])[0]
        return objection_to_python(("python", *words[words.index("-m") :]))
    return "" if program in ELSEWHERE or not command.whole else f"no test knows the program {program}"


def missing_files(words: tuple[str, ...]) -> str:
    return "".join(
        f"no file {word}; " for word in words if _PLACE.match(word) and not (ROOT / word.partition("::")[0]).exists()
    )


def objections_to_gspo(commands: list[Command]) -> list[str]:
    """What `gspo` would say. A mention gets the files that it does not name."""
    asked = [[*command.words[1:], *["1"] * extra] for command in commands for extra in range(1 if command.whole else 3)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cli.parsing"], input=json.dumps(asked), capture_output=True, text=True,
        cwd=ROOT, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = iter(json.loads(done.stdout))
    found = []
    for command in commands:
        answers = [next(said) for _ in range(1 if command.whole else 3)]
        understood = "" in answers or (not command.whole and _LEFT_OUT.search(answers[-1]))
        found.append("" if understood else answers[0])
    return found


def objection_to_tasks(words: tuple[str, ...]) -> str:
    """The integration's parser is in a module that needs somebody else's package."""
    source = Path(gspo.tasks.integrations.__file__).with_name(f"{words[2]}.py")
    flags = tuple(word for word in words if word != "--python")
    return unknown_flags(flags, source) if source.is_file() else f"no integration {words[2]}"


def told(commands: list[Command]) -> list[str]:
    """What is wrong with commands, each with its place."""
    ours = [each for each in commands if each.words[0] == "gspo" and each.words[1:2] != ("tasks",)]
    found = list(zip(ours, objections_to_gspo(ours), strict=True))
    found += [(command, missing_files(command.words)) for command in commands]
    for command in commands:
        if command.words[:2] == ("gspo", "tasks"):
            found.append((command, objection_to_tasks(command.words) if len(command.words) > 2 else ""))
        elif command.words[0] != "gspo":
            found.append((command, objection(command)))
    return [f"{command.place}: {shlex.join(command.words)}: {text}" for command, text in found if text]


def test_every_command_can_be_given() -> None:
    commands = list(dict.fromkeys(shown()))
    programs = [command.words[0] for command in commands]
    assert programs.count("gspo") > 80
    assert programs.count("make") > 50
    assert told(commands) == []


def test_a_command_that_cannot_be_given_is_found() -> None:
    planted = (
        "gspo audit runs/a --jsn", "gspo run a.toml --set batch.max_lags=1", "gspo replay a --bathces 3", "gspo nothing",
        "gspo learner a.toml --profiles", "kubectl exec broker-0 -- gspo stop a --forced", "make tst", "make images IMAGE=a",
        "python -m benchmarks.nothing", "python -m benchmarks.study --job 2", "python benchmarks/nothing.py",
        "python -m benchmarks.demo_seeds --seed 0",
        "gspo tasks verifiers a --limits 1", "gspo tasks nobody a", "gspo run examples/nothing.toml", "frobnicate",
    )  # fmt: skip
    mentioned = ("gspo eval --chekpoint 3", "gspo agruments", "make tst")
    commands = [command for line in planted for command in commands_of(line, "planted")]
    commands += [command for line in mentioned for command in commands_of(line, "mentioned", whole=False)]
    found = told(commands)
    assert len(found) == len(commands) == len(planted) + len(mentioned), found
    assert any("unrecognized arguments: --jsn" in each for each in found)
    assert any("no setting batch.max_lags" in each for each in found)
    assert any("no target tst" in each for each in found)
