"""Hostile programs, drawn by a seed: each has a verdict of its own, and none sees or disturbs another sandbox."""

import asyncio
import os
from dataclasses import replace

import pytest

from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, RunOutcome, Sandbox, SandboxError
from tests.sandbox.conftest import LIMITS, TIGHT, python
from tests.sandbox.hostile.programs import CANARY, KINDS, SEEN, HostileProgram, draw

pytestmark = pytest.mark.sandbox

COUNT = int(os.environ.get("GSPO_TEST_HOSTILE", len(KINDS)))
SEED = int(os.environ.get("GSPO_TEST_SEED", "1"))
RUNS_A_SANDBOX = 25
WITNESS = f"""
import socket, sys, time
name = "{CANARY}"
open("/tmp/" + name, "w").write("mine")
end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
end.bind("\\0" + name)
end.listen()
end.settimeout(1)
try:
    end.accept()
    print("somebody came")
except TimeoutError:
    print(open("/tmp/" + name).read())
"""


class Battery:
    """Runs programs, some in one sandbox after the other, and notes what should not have happened."""

    def __init__(self, programs: list[HostileProgram]) -> None:
        self.left = programs[::-1]
        self.faults: list[str] = []
        self.endings: dict[str, int] = {}

    async def work(self, sandboxes: LocalSandboxes) -> None:
        """Until no program is left."""
        while self.left:
            async with sandboxes.acquire() as sandbox:
                for _ in range(RUNS_A_SANDBOX):
                    if not self.left or not await self.one(sandbox, self.left.pop()):
                        break

    async def one(self, sandbox: Sandbox, program: HostileProgram) -> bool:
        """Whether the sandbox can be used after this program."""
        where = f"{program.kind} {program.number}"
        try:
            outcome = await python(sandbox, program.text, TIGHT)
        except SandboxError as error:
            self.faults.append(f"{where} has no verdict: {error}")
            return False
        ending = ending_of(outcome)
        self.endings[ending] = self.endings.get(ending, 0) + 1
        if ending in ("nothing", "several"):
            self.faults.append(f"{where} has no verdict: {outcome}")
        if SEEN.encode() in outcome.stdout:
            self.faults.append(f"{where}: {outcome.stdout[:500]!r}")
        try:
            after = await python(sandbox, "print('next')")
        except SandboxError as error:
            self.faults.append(f"after {where} nothing runs: {error}")
            return False
        if after.stdout != b"next\n":
            self.faults.append(f"after {where}: {after}")
        return True


def ending_of(outcome: RunOutcome) -> str:
    """What ended a run: one thing, or "nothing" and "several" where it is not so."""
    code, number, limit = outcome.exit_code, outcome.signal, outcome.limit
    found = [*["exit"][: code is not None], *["signal"][: number is not None], *[limit or ""][: limit is not None]]
    return found[0] if len(found) == 1 else "several" if found else "nothing"


async def test_every_hostile_program_has_a_verdict_of_its_own_and_sees_nobody(nothing_is_left: None) -> None:
    battery = Battery(draw(SEED, COUNT))
    undisturbed = []
    async with LocalSandboxes(LocalOptions(max_sandboxes=3, warm=0)).opened() as sandboxes, sandboxes.acquire() as witness:
        work = asyncio.gather(*(battery.work(sandboxes) for _ in range(2)))
        while not work.done():
            undisturbed.append(await python(witness, WITNESS, replace(LIMITS, wall_s=60)))
        await work
    print(battery.endings)
    assert battery.faults == []
    assert {outcome.stdout for outcome in undisturbed} == {b"mine\n"}
    assert sum(battery.endings.values()) == COUNT
    assert {"exit", "signal", "wall", "memory"} <= set(battery.endings)
