"""How programs of each language are compiled and run in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec


class Toolchain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One language. Its files lie in /sandbox, and commands run in an empty /tmp."""

    file: str
    """The program's file in /sandbox."""
    compile: list[str] = []
    """The command that compiles it; empty for an interpreter."""
    compile_again: list[str] = []
    """Another one, for what the first refuses."""
    run: list[str]
    """The command that runs it."""
    probe: str
    """A program that prints 7: a rollout starts only where it does."""
    tags: list[str] = []
    """What a fence may call the language, beside its name."""


def _gxx(standard: str) -> list[str]:
    files = ["-o", "/sandbox/solution", "/sandbox/solution.cpp"]
    return ["g++", f"-std={standard}", "-O2", "-DONLINE_JUDGE", "-pipe", "-s", *files]


# As judges do: recursion is bounded by the memory of the problem, and not by a smaller stack.
_ON_A_LARGE_STACK: Final = 'ulimit -s unlimited 2>/dev/null || ulimit -s $(ulimit -H -s); exec /sandbox/solution "$@"'

TOOLCHAINS: Mapping[str, Toolchain] = MappingProxyType(
    {
        "python": Toolchain(
            file="solution.py", run=["python", "solution.py"], probe="print(7)\n", tags=["py", "python3", "pypy", "pypy3"]
        ),
        "cpp": Toolchain(
            file="solution.cpp",
            compile=_gxx("c++20"),
            # C++20 has taken some names that older programs have for their own.
            compile_again=_gxx("c++17"),
            run=["sh", "-c", _ON_A_LARGE_STACK, "sh"],
            probe='#include <cstdio>\nint main() { puts("7"); }\n',
            tags=["c++", "cc", "cxx", "c++11", "c++14", "c++17", "c++20", "cpp17", "cpp20"],
        ),
    }
)
"""The languages that are known. The machine has to have their compilers."""

_WORD: Final = re.compile(r"[\s{.]*([\w+#-]+)")


def language_of(tag: str, allowed: Mapping[str, Toolchain]) -> str | None:
    """The language that a fence means: the first allowed one for a fence without a name; None for one that is not
    allowed."""
    if not tag:
        return next(iter(allowed))
    found = _WORD.match(tag)
    word = found[1] if found else tag
    return next((name for name, toolchain in allowed.items() if word == name or word in toolchain.tags), None)
