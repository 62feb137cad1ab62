"""``python -m tests.support.cli.parsing``: what is wrong with command lines of `gspo`, by the parsers that would read them.

Reads a JSON list of lists of words, and writes a list of texts, which are empty where nothing is wrong. No command acts: a
process of its own, because each ends where its arguments are parsed.
"""

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gspo_services.cli.main import main
from gspo_services.shared.settings.keys import all_keys


class Parsed(BaseException):
    """The arguments are parsed; no command may catch it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments


class Replaced(BaseException):
    """The command would become another process."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


def ends(parse: Callable[..., argparse.Namespace]) -> Callable[..., NoReturn]:
    def parse_and_end(*arguments: Any, **named: Any) -> NoReturn:
        raise Parsed(parse(*arguments, **named))

    return parse_and_end


def become(_: str, words: list[str]) -> NoReturn:
    raise Replaced(words)


def carry_out(words: list[str]) -> None:
    """As far as its arguments. Raises: Parsed; SystemExit for what the parser refuses."""
    if words[0] == "sglang-cpu":
        raise Parsed(argparse.Namespace())  # SGLang's own parser reads the rest, after half a minute of imports.
    try:
        main(words)
    except Replaced as replaced:
        module, *words = replaced.words[replaced.words.index("-m") + 1 :]
        if module == "gspo_services.cli.tool":
            module, *words = words
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def objection(words: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            carry_out(words)
    except Parsed as parsed:
        keys = [each.partition("=")[0] for each in getattr(parsed.arguments, "overrides", None) or ()]
        known = all_keys()
        return "".join(
            f"no setting {key}; " for key in keys if key not in known and not key.startswith("environment.options.")
        )
    except SystemExit as end:
        return said.getvalue().strip().rpartition("\n")[2] if end.code else ""
    return f"its arguments were never parsed: {said.getvalue()}"


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = ends(argparse.ArgumentParser.parse_args)  # type: ignore[method-assign]
    os.execv = become  # type: ignore[assignment]
    commands = json.load(sys.stdin)
    json.dump([objection(words) for words in commands], sys.stdout)
