"""A command that stands still at one place, where a test ends it: ``standing(...)``, or as a process

    python -m tests.support.processes.standing PLACE NUMBER ENTRY WORDS...

PLACE and ENTRY are "module:function"; PLACE may be "module:Class.method". After the NUMBER-th call of PLACE the command says
STANDS on standard error, and goes on when its standard input ends.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.support.processes.run_process import REPOSITORY

STANDS: Final = "it stands"
MAIN: Final = "gspo_services.cli.main:main"


@contextmanager
def standing(place: str, number: int, *words: str, entry: str = MAIN) -> Iterator[subprocess.Popen[str]]:
    """The command ``words``, once it stands. It is killed at the end of the block."""
    command = [sys.executable, "-m", __name__, place, str(number), entry, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=REPOSITORY, **pipes) as process:  # type: ignore[call-overload]
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if line.strip() == STANDS:
                    break
            else:
                raise AssertionError(f"it never stood: {''.join(said)}")
            yield process
        finally:
            process.kill()


def _main(place: str, number: str, entry: str, *words: str) -> int:
    module, _, names = place.partition(":")
    *outer, name = names.split(".")
    home: Any = importlib.import_module(module)
    for each in outer:
        home = getattr(home, each)
    plain, left = getattr(home, name), [int(number)]

    def stands(*arguments: Any, **named: Any) -> Any:
        result = plain(*arguments, **named)
        left[0] -= 1
        if left[0] == 0:
            print(STANDS, file=sys.stderr, flush=True)
            sys.stdin.read()
        return result

    setattr(home, name, stands)
    module, _, function = entry.partition(":")
    sys.argv = [module, *words]
    run = getattr(importlib.import_module(module), function)
    return int(run(list(words)) if entry == MAIN else run())


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
