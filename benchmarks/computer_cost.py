"""200 agents, each with a computer, on as many sandboxes as there are processors: what waits for what, and what it costs.

    python -m benchmarks.computer_cost [--agents 200] [--commands 3] [--rounds 2]

Each agent writes three files and gives commands, each an edit and a test in Python, as soon as it has the last one's answer.
Alternating rounds: with sandboxes that are started ahead (sandbox.warm), without, and the same commands as bare processes,
as many at a time. On a busy machine take only ratios within a run.
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from gspo.tasks.agents import Episode
from gspo_services.tasks.agents import AgentPool, AgentPoolOptions, AgentTask, NoJournal, UserOutput
from gspo_services.tasks.computers import ComputerOptions
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, RunOutcome, Sandbox, SandboxLimits

FILES: Final = {"hat.py": "def hat(a, b):\n    return a+b\n", "cap.py": "x = 1\n", "test.py": "from hat import hat\n"}
COMMAND: Final = "sed -i s/a.b/a-b/ hat.py && python test.py"
WARM: Final = (2, 0)


async def work(episode: Episode) -> float:
    """An agent that gives its commands."""
    await episode.computer.write(FILES)
    for _ in range(episode.task["commands"]):
        result = await episode.computer.run(COMMAND, 60.0)
        assert result.exit_code == 0, result
    return 1.0


def processor_s(pid: int) -> float:
    """Of a process and all below it, also of those that have ended and been waited for."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True)))
    return 0.0


class Timed:
    """Sandboxes that say how long each part takes: seconds by name, of all commands."""

    def __init__(self, inner: LocalSandboxes) -> None:
        self._inner = inner
        self.wall_s: defaultdict[str, float] = defaultdict(float)
        self.processor_s = 0.0
        self.wanted = 0
        self.most_wanted = 0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Sandbox]:
        self.wanted += 1
        self.most_wanted = max(self.most_wanted, self.wanted)
        asked = time.perf_counter()
        async with self._inner.acquire() as sandbox:
            self.wanted -= 1
            self.wall_s["until a sandbox is there"] += time.perf_counter() - asked
            yield TimedSandbox(sandbox, self.wall_s)
            self.processor_s += processor_s(sandbox._process.pid)
            ended = time.perf_counter()
        self.wall_s["end of the sandbox"] += time.perf_counter() - ended


class TimedSandbox:
    """One of them."""

    def __init__(self, inner: Sandbox, wall_s: defaultdict[str, float]) -> None:
        self._inner = inner
        self._wall_s = wall_s

    async def put(self, files: Mapping[str, bytes]) -> None:
        begin = time.perf_counter()
        await self._inner.put(files)
        self._wall_s["files in" if "tool/files" in files else "files out"] += time.perf_counter() - begin

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        begin = time.perf_counter()
        outcome = await self._inner.prepare(command, limits)
        name = {"tool/unpack.py": "files in", "tool/pack.py": "files out"}.get(command[-1], "command")
        self._wall_s[name] += time.perf_counter() - begin
        return outcome

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        return await self._inner.run(command, limits, stdin)


async def in_sandboxes(agents: int, commands: int, cores: int, warm: int) -> None:
    """One round, with its lines."""
    async with LocalSandboxes(LocalOptions(max_sandboxes=cores, warm=warm)).opened() as inner, asyncio.TaskGroup() as tasks:
        sandboxes = Timed(inner)
        options = ComputerOptions(sandboxes=sandboxes, max_bytes=8 << 20, memory_bytes=512 << 20, max_wall_s=120)
        pool = AgentPool(
            "benchmarks.computer_cost:work", AgentPoolOptions(num_workers=2), tasks=tasks, output=UserOutput(None),
            computers=options,
        )  # fmt: skip
        async with pool:
            await pool.solve(task_of(0, 1), NoJournal())
            sandboxes.wall_s.clear()
            sandboxes.processor_s, own, begin = 0.0, time.process_time(), time.perf_counter()
            await asyncio.gather(*(pool.solve(task_of(seed, commands), NoJournal()) for seed in range(agents)))
            wall_s, number = time.perf_counter() - begin, agents * commands
            own_s = time.process_time() - own
    held_s = sum(sandboxes.wall_s.values()) - sandboxes.wall_s["until a sandbox is there"]
    print(f"{cores} sandboxes, {warm} ahead: {number / wall_s:.1f} commands/s; ", end="")
    print(
        f"held {held_s / wall_s / cores:.0%} of the time; {sandboxes.most_wanted} waited at most; ms of a processor ", end=""
    )
    print(f"a command: sandbox {1000 * sandboxes.processor_s / number:.0f}, rollout {1000 * own_s / number:.1f}")
    print("  ms a command: " + ", ".join(f"{name} {1000 * each / number:.0f}" for name, each in sandboxes.wall_s.items()))


def task_of(seed: int, commands: int) -> AgentTask:
    task: dict[str, Any] = {"commands": commands}
    return AgentTask(task=task, seed=seed, base_url="http://127.0.0.1:9/v1", api_key="key", model="policy", deadline_s=3600)


async def bare(number: int, cores: int) -> None:
    """The commands without walls."""
    left, environment = iter(range(number)), {"PATH": f"{LocalOptions().python.parent}:/usr/bin:/bin"}

    async def one_after_another(folder: Path) -> None:
        for name, text in FILES.items():
            (folder / name).write_text(text)
        for _ in left:
            process = await asyncio.create_subprocess_shell(COMMAND, cwd=folder, stdout=subprocess.DEVNULL, env=environment)
            assert await process.wait() == 0

    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(each)) for each in range(cores)]
        for place in places:
            place.mkdir()
        begin, used = time.perf_counter(), os.times()
        await asyncio.gather(*map(one_after_another, places))
        wall_s, now = time.perf_counter() - begin, os.times()
    each_s = (now.children_user + now.children_system - used.children_user - used.children_system) / number
    print(f"{cores} bare: {number / wall_s:.1f} commands/s; ms of a processor a command: {1000 * each_s:.0f}")


async def measure(agents: int, commands: int, rounds: int) -> None:
    """Print the table."""
    cores = os.cpu_count() or 1
    for _ in range(rounds):
        for warm in WARM:
            await in_sandboxes(agents, commands, cores, warm)
        await bare(agents * commands // 4, cores)


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--commands", type=int, default=3, help="of each agent")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.agents, arguments.commands, arguments.rounds))


if __name__ == "__main__":
    main()
