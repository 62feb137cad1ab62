"""``gspo sandbox --try``: whether the sandbox that a configuration names works, what is in it, and how fast it is."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import SandboxSection
from gspo_services.tasks.sandbox import LocalSandboxes, Sandbox, SandboxError, SandboxLimits, open_configured

RUNS: Final = 50
LIMITS: Final = SandboxLimits(wall_s=10, cpu_s=10)
SCRIPT: Final = b"import sys\nprint(sys.version.split()[0])\n"
FIND: Final = b"import shutil, sys\nfor name in sys.argv[1:]: print(shutil.which(name) or '')\n"


async def try_sandbox(section: SandboxSection, programs: Sequence[str], say: Callable[[str], object]) -> int:
    """Run some programs and say how it went. Returns 0, or 1 when one of ``programs`` is not there.

    Raises: ConfigurationError where programs cannot be separated or a server refuses.
    """
    where = ", ".join(section.urls) or "bubblewrap on this machine"
    async with open_configured(section) as sandboxes:
        try:
            async with sandboxes.acquire() as sandbox:
                await sandbox.put({"try.py": SCRIPT, "find.py": FIND})
                first = await sandbox.run(["python", "try.py"], LIMITS)
                say(f"ok    {where}: Python {one_line(first.stdout.decode(errors='replace').strip(), 40)}\n")
                begin = time.perf_counter()
                for _ in range(RUNS):
                    await sandbox.run(["python", "try.py"], LIMITS)
                if isinstance(sandboxes, LocalSandboxes):
                    say(f"ok    memory of programs: {one_line(sandboxes.memory)}\n")
                say(f"ok    {RUNS} runs, one after the other: {1000 * (time.perf_counter() - begin) / RUNS:.1f} ms each\n")
                return await _find(sandbox, programs, say)
        except SandboxError as error:
            say(f"fail  {where}: {one_line(error)}\n")
            return 1


async def _find(sandbox: Sandbox, programs: Sequence[str], say: Callable[[str], object]) -> int:
    if not programs:
        return 0
    outcome = await sandbox.run(["python", "find.py", *programs], LIMITS)
    found = outcome.stdout.decode(errors="replace").split("\n")
    for name, path in zip(programs, found, strict=False):
        if path:
            say(f"ok    {one_line(name, 100)}: {one_line(path, 200)}\n")
        else:
            out = "install it where the sandbox runs, below /usr or, with its whole path, in a folder of sandbox.read_only"
            say(f"fail  {one_line(name, 100)}: not found in the sandbox; {out}\n")
    return 0 if all(found[: len(programs)]) else 1
