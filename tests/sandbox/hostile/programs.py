"""Hostile programs, drawn by a seed: kinds with parameters. One that sees another sandbox or the host prints it."""

import random
from dataclasses import dataclass

from tests.sandbox.hostile import files, memory, others, processes
from tests.sandbox.hostile.registry import CANARY, HEAD, KINDS, SEEN

__all__ = ["CANARY", "KINDS", "SEEN", "HostileProgram", "draw", "files", "memory", "others", "processes"]


@dataclass(frozen=True)
class HostileProgram:
    """A Python program of one kind."""

    kind: str
    number: int
    text: str


def draw(seed: int, count: int) -> list[HostileProgram]:
    """``count`` programs, of all kinds in turn, each with parameters of its own."""
    names = sorted(KINDS)
    programs = []
    for number in range(count):
        name = names[number % len(names)]
        rng = random.Random(f"{seed} {number}")
        programs.append(HostileProgram(name, number, HEAD + KINDS[name](rng)))
    return programs
