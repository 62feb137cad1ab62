"""How much memory hostile programs take from the machine, measured by a cgroup that the sandboxes use or not."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from gspo_services.tasks.sandbox.cgroups import NO_CGROUP, MemoryCgroups, memory_cgroups
from tests.sandbox.hostile.programs import KINDS

pytestmark = pytest.mark.sandbox

MEASURED = """
import asyncio, contextlib, os, sys
from gspo_services.tasks.sandbox import local
from gspo_services.tasks.sandbox.cgroups import MemoryCgroups
from tests.sandbox.conftest import TIGHT, python
from tests.sandbox.hostile.programs import draw, KINDS
os.write(int(sys.argv[1]), b"0")
if sys.argv[2] == "counted":
    local.memory_cgroups = lambda: contextlib.nullcontext(MemoryCgroups(None, "", "no cgroup (a test)"))
async def main():
    async with local.LocalSandboxes(local.LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        print("memory by", sandboxes.memory, flush=True)
        async with sandboxes.acquire() as sandbox:
            for program in draw(1, int(sys.argv[3]) * len(KINDS)):
                if program.kind.startswith("memory_"):
                    outcome = await python(sandbox, program.text, TIGHT)
                    print(program.kind, outcome.limit, flush=True)
asyncio.run(main())
"""
EACH = 3
"""Programs of each kind."""
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
AROUND_BYTES = 140 << 20
"""The process that opens the sandboxes, and theirs."""
MOST_BYTES = {
    # Memory, files, and the kernel's slack.
    "cgroup": (64 + 32 + 16) << 20,
    # The same, what 12 copies of init may rewrite, pipes, and what is filled between two looks.
    "counted": (64 + 2 * 32 + 120 + 96 + 60) << 20,
}


@pytest.fixture
def cgroups() -> Iterator[MemoryCgroups]:
    with memory_cgroups() as found:
        if found.described.startswith(NO_CGROUP):
            pytest.skip(f"nothing measures memory here: {found.described}")
        yield found


@pytest.mark.parametrize("by", MOST_BYTES)
def test_no_kind_of_memory_is_free(cgroups: MemoryCgroups, by: str) -> None:
    processes, *_ = cgroups.files(0)
    command = [sys.executable, "-c", MEASURED, str(processes), by, str(EACH)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, pass_fds=[processes], check=True)
    memory, *lines = (line for line in done.stdout.splitlines() if line.startswith("memory"))
    if by == "cgroup" and NO_CGROUP in memory:
        pytest.skip(f"a part of a cgroup has none here: {memory}")
    assert len(lines) == EACH * sum(name.startswith("memory_") for name in KINDS)
    (peak,) = (path for name in PEAKS for path in cgroups.folder(0).glob(name))
    taken = int(peak.read_text())
    print(f"{by}: {taken >> 20} MiB")
    assert taken < AROUND_BYTES + MOST_BYTES[by]
