"""``python -m gspo_services.cli.tool MODULE [WORDS]``: a command in its own process, which names the extra that it lacks."""

import re
import sys
from typing import Final

from gspo_services.shared.runtime.errors import EXIT_CONFIGURATION
from gspo_services.shared.runtime.plain_text import indented_lines

DISTRIBUTIONS: Final = {"zmq": "pyzmq", "google": "protobuf"}
"""Packages that are imported under another name."""
ORDER: Final = ("services", "learner")
"""Of several extras with a package the first of these: the others are for parts of it."""


def main() -> int:
    """Run the module as ``python -m`` does. Returns the exit status of a command that cannot be imported."""
    import runpy

    module, *words = sys.argv[1:]
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        text = lacking(error)
        if not text:
            raise
        sys.stderr.write(indented_lines(f"gspo: {text}") + "\n")
        return EXIT_CONFIGURATION
    return 0


def lacking(error: ModuleNotFoundError) -> str:
    """How to install what was not found, for people; empty when we do not require it."""
    module = (error.name or "").partition(".")[0]
    wanted = _canonical(DISTRIBUTIONS.get(module, module))
    extras = [extra for name, extra in _requirements() if name == wanted]
    if not extras:
        return ""
    if "" in extras:
        return f"this needs {wanted}, which is not installed here: pip install gspo"
    extra = next((each for each in ORDER if each in extras), extras[0])
    there = f"which is not installed here: pip install 'gspo[{extra}]', or all that a run needs: gspo setup"
    return f"this needs {wanted}, of the extra {extra}, {there}"


def _requirements() -> list[tuple[str, str]]:
    """Each package of each extra; "": of none."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("gspo") or []
    except PackageNotFoundError:
        return []
    found = [re.match(r"([\w.-]+)(?:.*extra == [\"']([\w-]+)[\"'])?", line) for line in lines]
    return [(_canonical(each[1]), each[2] or "") for each in found if each]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
