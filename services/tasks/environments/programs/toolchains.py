"""How programs of each language are compiled and run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Toolchain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One language. Its files lie in /sandbox, and commands run in an empty /tmp."""

    file: str
    """The program's file in /sandbox."""
    compile: list[str] = []
    """The command that compiles it; empty for an interpreter."""
    run: list[str]
    """The command that runs it."""
    probe: str
    """A program that prints 7: a rollout starts only where it does."""
    tags: list[str] = []
    """What a fence may call the language, beside its name."""


TOOLCHAINS: Mapping[str, Toolchain] = MappingProxyType(
    {
        "python": Toolchain(
            file="solution.py", run=["python", "solution.py"], probe="print(7)\n", tags=["py", "python3", "pypy", "pypy3"]
        ),
        "cpp": Toolchain(
            file="solution.cpp",
            compile=["g++", "-std=c++17", "-O2", "-o", "/sandbox/solution", "/sandbox/solution.cpp"],
            run=["/sandbox/solution"],
            probe='#include <cstdio>\nint main() { puts("7"); }\n',
            tags=["c++", "cc", "c++17", "c++20"],
        ),
    }
)
"""The languages that are known. The machine has to have their compilers."""


def language_of(tag: str, allowed: Mapping[str, Toolchain]) -> str | None:
    """The language that a fence means: the first allowed one for a fence without a name; None for one that is not
    allowed."""
    if not tag:
        return next(iter(allowed))
    word = tag.split()[0] if tag.split() else tag
    return next((name for name, toolchain in allowed.items() if word == name or word in toolchain.tags), None)
