"""The cost of a weight update to an SGLang server that is answering: recomputed tokens, and CPU time.

    python -m benchmarks.pipeline.update_cost --json update_cost.json

A real server, started as a rollout starts it, answers the same questions with the same seeds again and again. As many are
under way as a run has episodes, each at a different point. Every other pass has weight updates as a rollout makes them
(pause, load, checksums, resume), of the same weights. Everything else is equal, so the difference is due to the updates.
Servers with other settings take turns with it. Token counts are exact on a busy machine, CPU seconds only rough.
"""

import argparse
import asyncio
import json
import platform
import random
import re
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
import structlog

from benchmarks.pipeline.processes import SCHEDULER, SERVER, role_of
from gspo_services.rollout.sglang import Engine, EngineServer, GenerateRequest, PauseMode, SamplingParameters, ServerOptions
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.runtime.logs import configure_logging

log = structlog.get_logger()

PREFILL: Final = re.compile(r"Prefill batch.*?#new-token: (\d+), #cached-token: (\d+)")
AT_ONCE: Final = ("--prefill-decode-interval", "0")
SERVERS: Final[Mapping[str, tuple[PauseMode, tuple[str, ...]]]] = {
    "as it is started": ("retract", ()),
    "each request at once": ("retract", AT_ONCE),
    "each prompt by itself": ("retract", ("--schedule-policy", "fcfs", "--chunked-prefill-size", "4096")),
    "SGLang's own order": ("retract", ("--schedule-policy", "fcfs", "--chunked-prefill-size", "4096", *AT_ONCE)),
    "in place": ("in_place", ()),
}
"""How generation is paused, and the extra arguments of the server."""


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """The prefill batches in SGLang's log."""

    batches: int = 0
    new_tokens: int = 0
    """Computed."""
    cached_tokens: int = 0
    """Tokens found in the prefix cache."""


@dataclass(kw_only=True)
class Pass:
    """One pass over all questions."""

    updates: int
    prefill: Prefill = field(default_factory=Prefill)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds of SGLang's scheduler, of the rest of the server, and of the client."""
    stop_s: list[float] = field(default_factory=list)
    """The scheduler's CPU seconds for each pause; ``load_s`` and ``checksums_s``: for the other parts of an update."""
    load_s: list[float] = field(default_factory=list)
    checksums_s: list[float] = field(default_factory=list)
    action_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the whole pipeline's runs."""

    groups: int = 16
    group_size: int = 8
    at_a_time: int = 64
    prompt_letters: int = 153
    turn_tokens: int = 64
    hidden_size: int = 256
    layers: int = 2

    def limit(self, number: int) -> int:
        """Return the most tokens of the answer to the request of this number.

        The first requests end one after the other, so that later no two are at the same point.
        """
        first = number < self.at_a_time
        return max(1, self.turn_tokens * (number + 1) // self.at_a_time) if first else self.turn_tokens


def prefill_of(text: str) -> Prefill:
    """Sum over the prefill batches of a piece of SGLang's log."""
    found = [(int(new), int(cached)) for new, cached in PREFILL.findall(text)]
    return Prefill(
        batches=len(found), new_tokens=sum(new for new, _ in found), cached_tokens=sum(cached for _, cached in found)
    )


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's threads, to the nanosecond; the clock id is as in clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


class Measured:
    """One server that answers and is updated."""

    def __init__(self, engine: Engine, server: EngineServer, model: Path, log_path: Path, mode: PauseMode) -> None:
        self._engine = engine
        self._model = model
        self._log_path = log_path
        self._mode = mode
        self._version = 0
        self._stop_ids = tuple(sorted(ChatTokenizer(model).stop_ids))
        self._pids: dict[str, list[int]] = {SCHEDULER: [], SERVER: []}
        for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
            role = role_of(process.cmdline(), "")
            if role in self._pids:
                self._pids[role].append(process.pid)
        if not self._pids[SCHEDULER]:
            raise RuntimeError(f"no scheduler among the processes of the server, {server.pid}")

    async def answer_all(self, groups: Sequence[Sequence[int]], sizes: Sizes, updates: int) -> Pass:
        """Ask for ``sizes.group_size`` answers to each prompt, with the given number of updates spread evenly over them."""
        found = Pass(updates=updates)
        requests = list(self._requests(groups, sizes))
        await self._engine.control("/flush_cache", {}, timeout_s=60.0)
        begin, log_begin = self._cpu_s(), self._log_path.stat().st_size
        answered, due = 0, asyncio.Queue[None]()
        every = len(requests) // (updates + 1)
        waiting = iter(requests)

        async def work() -> None:
            nonlocal answered
            for request in waiting:
                async with aclosing(self._engine.generate(request)) as pieces:
                    async for piece in pieces:
                        found.action_tokens += len(piece.token_ids)
                answered += 1
                if answered % every == 0 and answered // every <= updates:
                    due.put_nowait(None)

        async def update() -> None:
            for _ in range(updates):
                await due.get()
                await self._update(found)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(update(), name="updates")
            for number in range(sizes.at_a_time):
                tasks.create_task(work(), name=f"client-{number}")
        found.cpu_s = {role: seconds - begin[role] for role, seconds in self._cpu_s().items()}
        with self._log_path.open("rb") as file:
            file.seek(log_begin)
            found.prefill = prefill_of(file.read().decode(errors="replace"))
        return found

    def _requests(self, groups: Sequence[Sequence[int]], sizes: Sizes) -> Iterator[GenerateRequest]:
        prompts = [prompt for prompt in groups for _ in range(sizes.group_size)]
        for number, prompt in enumerate(prompts):
            sampling = SamplingParameters(max_new_tokens=sizes.limit(number), stop_token_ids=self._stop_ids, seed=number)
            yield GenerateRequest(rid=f"question-{number}", input_ids=prompt, sampling=sampling)

    async def _update(self, found: Pass) -> None:
        self._version += 1
        marks = [self._scheduler_s()]
        await self._engine.pause(self._mode)
        marks.append(self._scheduler_s())

        async def check() -> None:
            marks.append(self._scheduler_s())
            await self._engine.weights_checksums()
            marks.append(self._scheduler_s())

        await self._engine.update_weights_from_disk(self._model, self._version, check=check)
        await self._engine.resume()
        stop, load, checksums = (after - before for before, after in pairwise(marks))
        found.stop_s.append(stop)
        found.load_s.append(load)
        found.checksums_s.append(checksums)

    def _scheduler_s(self) -> float:
        return sum(process_cpu_s(pid) for pid in self._pids[SCHEDULER])

    def _cpu_s(self) -> dict[str, float]:
        roles = {role: sum(process_cpu_s(pid) for pid in pids) for role, pids in self._pids.items()}
        return roles | {"client": time.process_time()}


def summary(name: str, passes: Sequence[Pass]) -> dict[str, Any]:
    """Return medians, per answered token and per update, of the extra cost of passes with updates.

    Raises: ValueError without both.
    """
    still, updated = [each for each in passes if not each.updates], [each for each in passes if each.updates]
    if not still or not updated:
        raise ValueError(f"{name}: {len(still)} passes without updates and {len(updated)} with some: both are needed")

    def more(what: Callable[[Pass], float]) -> float:
        return (median(map(what, updated)) - median(map(what, still))) / updated[0].updates

    def part_ms(what: Callable[[Pass], list[float]]) -> int:
        return round(1000 * median(seconds for each in updated for seconds in what(each)))

    return {
        "server": name,
        "prefilled tokens": round(median(each.prefill.new_tokens for each in still)),
        "prefill passes": round(median(each.prefill.batches for each in still)),
        "scheduler, us a token": round(median(1e6 * each.cpu_s[SCHEDULER] / each.action_tokens for each in still)),
        "with updates, us a token": round(median(1e6 * each.cpu_s[SCHEDULER] / each.action_tokens for each in updated)),
        "tokens again": round(more(lambda each: each.prefill.new_tokens)),
        "scheduler, ms an update": round(1000 * more(lambda each: each.cpu_s[SCHEDULER])),
        "of that stop": part_ms(lambda each: each.stop_s),
        "load": part_ms(lambda each: each.load_s),
        "checksums": part_ms(lambda each: each.checksums_s),
        "server and client, ms": round(1000 * more(lambda each: each.cpu_s[SERVER] + each.cpu_s["client"])),
    }


async def measure(names: Sequence[str], directory: Path, sizes: Sizes, updates: int, rounds: int) -> dict[str, list[Pass]]:
    """Run passes without and with updates in turns, on all servers in turns, after a short pass of each to warm up."""
    model, letters = directory / "model", random.Random(0)
    tokenizer = ChatTokenizer(model)
    lines = ["".join(letters.choices(string.ascii_lowercase, k=sizes.prompt_letters)) for _ in range(sizes.groups)]
    groups = [tokenizer.prompt_ids([{"role": "user", "content": line}]) for line in lines]
    passes: dict[str, list[Pass]] = {name: [] for name in names}
    async with AsyncExitStack() as stack:
        started = (_started(stack, name, model, directory / f"{at}.log", sizes) for at, name in enumerate(names))
        measured = dict(zip(names, await asyncio.gather(*started), strict=True))
        for each in measured.values():
            await each.answer_all(groups[:2], sizes, 0)
        for number in range(2 * rounds):
            for name, each in measured.items():
                passes[name].append(await each.answer_all(groups, sizes, updates * (number % 2)))
                log.info("pass", server=name, **asdict(passes[name][-1]))
    return passes


async def _started(stack: AsyncExitStack, name: str, model: Path, log_path: Path, sizes: Sizes) -> Measured:
    mode, extra_args = SERVERS[name]
    options = ServerOptions(model_path=model, log_path=log_path, max_running=sizes.at_a_time, extra_args=extra_args)
    server = await stack.enter_async_context(EngineServer(options))
    engine = await stack.enter_async_context(Engine(server.url, max_concurrency=sizes.at_a_time))
    return Measured(engine, server, model, log_path, mode)


def main() -> int:
    """Measure and print a table. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--updates", type=int, default=2, help="of a pass")
    parser.add_argument("--rounds", type=int, default=5, help="passes without and with updates")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    configure_logging("benchmark")
    from benchmarks.pipeline.model import ModelSize, make_model

    sizes = Sizes()
    size = ModelSize(hidden_size=sizes.hidden_size, num_hidden_layers=sizes.layers, moe_intermediate_size=sizes.hidden_size)
    with tempfile.TemporaryDirectory(prefix="gspo-update-cost-", dir="/dev/shm") as directory:
        make_model(Path(directory) / "model", size)
        measuring = measure(arguments.servers, Path(directory), sizes, arguments.updates, arguments.rounds)
        passes = asyncio.run(measuring)
    rows = [summary(name, each) for name, each in passes.items()]
    if arguments.json:
        made = {"machine": platform.platform(), "made": datetime.now(tz=UTC).isoformat(timespec="seconds")}
        every = {name: [asdict(one) for one in each] for name, each in passes.items()}
        content = made | {"sizes": asdict(sizes), "rows": rows, "passes": every}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
