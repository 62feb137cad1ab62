"""``gspo setup``: installs what a run needs beside this package, in the versions that are tested together.

Imports nothing but Python's standard library: whoever runs it has no more.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, NamedTuple

from gspo_services.shared.runtime.errors import ConfigurationError

Kind = Literal["cpu", "gpu"]
LOCKED: Final = ("--no-deps", "--require-hashes")
CPU_TORCH: Final = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
"""Where the CPU builds of PyTorch are: the package index has only those that need CUDA, for x86-64."""


class PipCall(NamedTuple):
    """The list in requirements/, more options, and variables."""

    name: str
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


DEEPSPEED: Final = ("--no-build-isolation",)
CALLS: Final[dict[Kind, tuple[PipCall, ...]]] = {
    # SGLang's own requirements are CUDA builds; cpu.txt names every package that it needs on a CPU.
    "cpu": (
        PipCall("torch", CPU_TORCH),
        PipCall("cpu"),
        PipCall("deepspeed", DEEPSPEED, ("DS_ACCELERATOR=cpu", "DS_BUILD_OPS=0")),
    ),
    "gpu": (PipCall("gpu"), PipCall("deepspeed", DEEPSPEED, ("DS_BUILD_OPS=0",))),
}


def setup_command(kind: Kind, *, only_print: bool) -> int:
    """Install the lists of ``kind`` into this environment, or print the commands. Returns the exit status.

    Raises: ConfigurationError when this installation has no lists, or this environment no pip.
    """
    commands = list(_commands(kind))
    if only_print:
        print("\n".join(shlex.join(command) for command in commands))
        return 0
    if find_spec("pip") is None:
        raise ConfigurationError(
            f"{sys.prefix} has no pip: add it with `{sys.executable} -m ensurepip`, or give your own installer "
            "what `gspo setup --print` prints"
        )
    for command in commands:
        print(f"$ {shlex.join(command)}", flush=True)
        done = subprocess.run(["env", *command], check=False)
        if done.returncode != 0:
            print(f"gspo setup: failed, and the rest was not tried: {shlex.join(command)}", file=sys.stderr)
            return 1
    print(f"installed into {sys.prefix}: all that a run needs on a {kind.upper()}")
    return 0


def _commands(kind: Kind) -> Iterator[list[str]]:
    lists = _lists()
    pip = [os.path.abspath(sys.executable), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for call in CALLS[kind]:
        yield [*call.variables, *pip, *LOCKED, *call.options, "-r", str(lists / f"{call.name}.txt")]


def _lists() -> Path:
    """Inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "requirements", package.parent / "requirements"):
        if (folder / "cpu.txt").is_file() and (folder / "gpu.txt").is_file():
            return folder
    raise ConfigurationError(f"{package} has no lists of requirements: install gspo from its wheel or its sources")
