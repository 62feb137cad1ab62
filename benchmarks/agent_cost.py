"""What an agent's episode costs beside an environment's: time and CPU of the same four turns on one SGLang server.

    python -m benchmarks.agent_cost [--episodes 96] [--waiting 200]

Four turns, 16 episodes at a time, in alternating rounds: the environment's loop; an agent over the endpoint with the openai
package; the same agent without a client library; the environment again, beside 200 agents that make three calls each, with a
tool after each that takes 5 s, or no time: waiting itself is to cost nothing. The model draws nearly evenly from all ids and
ends a turn after some 30 tokens, whoever asks. CPU is that of this process (loops, endpoint), of the agents' workers and of
SGLang.
"""

import argparse
import asyncio
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from prometheus_client import CollectorRegistry

from benchmarks.agents_that_talk import TURNS, Talk
from gspo_protocol.limits import trajectory_limits
from gspo_services.rollout.agents import open_agents, open_solver
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.episodes import EpisodeShared
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.rendering import create_renderer
from gspo_services.rollout.sglang import Engine, EngineServer, ServerOptions
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import EpisodeRunner
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.settings import override_settings
from gspo_services.shared.settings.sections import Settings
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer
from tests.support.episodes import RecordingBroker, ScriptedRewards, a_new_lease, no_tokens
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe

AT_A_TIME: Final = 16
TURN_TOKENS: Final = 30
ROUNDS: Final = 3
KINDS: Final = {"openai": "benchmarks.agents_that_talk:with_openai", "bare": "benchmarks.agents_that_talk:bare"}
BESIDE: Final = {"wait": "benchmarks.agents_that_talk:waits", "do not wait": "benchmarks.agents_that_talk:does_not_wait"}


@dataclass
class Cost:
    """Sums over rounds."""

    seconds: float = 0.0
    episodes: int = 0
    tokens: int = 0
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def line(self) -> str:
        cpu = ", ".join(f"{name} {1000 * used / self.episodes:.1f}" for name, used in self.cpu_s.items())
        return (
            f"{1000 * self.seconds / self.episodes:7.1f} ms and {self.tokens / self.episodes:.0f} tokens an episode; "
            f"CPU ms an episode: {cpu}"
        )


class Meter:
    """CPU seconds of this process, of SGLang, and of all others that this process has started."""

    def __init__(self, engine_pid: int) -> None:
        self._engine = psutil.Process(engine_pid)

    def read(self) -> dict[str, float]:
        engine = {self._engine, *self._engine.children(recursive=True)}
        others = set(psutil.Process().children(recursive=True)) - engine
        groups = {"rollout": {psutil.Process()}, "workers": others, "sglang": engine}
        return {name: sum(sum(each.cpu_times()[:2]) for each in group) for name, group in groups.items()}


async def play(episodes: EpisodeRunner, number: int, first_id: int, tasks: asyncio.TaskGroup, most: int = AT_A_TIME) -> int:
    """Run so many episodes; returns their tokens."""
    places = asyncio.Semaphore(most)

    async def one(trajectory_id: int) -> int:
        async with places:
            lease = a_new_lease(trajectory_id=trajectory_id, seed=trajectory_id, task={"question": f"{trajectory_id}?"})
            work = episodes.begin(lease, no_tokens(), tasks)
            await work.run()
            return work.num_tokens

    running = [tasks.create_task(one(first_id + index)) for index in range(number)]
    return sum([await each for each in running])


@asynccontextmanager
async def opened(directory: Path, engine: Engine, settings: Settings) -> AsyncIterator[Mapping[str, EpisodeRunner]]:
    """The episodes of each kind on one engine."""
    tokenizer, may_generate = ChatTokenizer(directory), asyncio.Event()
    may_generate.set()
    broker: Any = RecordingBroker()
    metrics = RolloutMetrics(CollectorRegistry())
    found: dict[str, EpisodeRunner] = {
        "environment": EnvironmentLoop(
            environment=Talk(), tokenizer=tokenizer, engine=engine, rewards=ScriptedRewards(), broker=broker,  # type: ignore[arg-type]
            may_generate=may_generate, max_turns=TURNS, chunk_tokens=64, metrics=metrics,
        )
    }  # fmt: skip
    shared = EpisodeShared(
        renderer=create_renderer(tokenizer, "template"), engine=engine, broker=broker, may_generate=may_generate,
        limits=trajectory_limits(256), chunk_tokens=64, metrics=metrics, wall_s=lambda: 0.0,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        for name, function in {**KINDS, **BESIDE}.items():
            own = override_settings(settings, [f"agent.function={function}", "agent.workers=1"])
            solve = await stack.enter_async_context(open_solver(own, name))
            found[name] = await stack.enter_async_context(
                open_agents(own, shared, solve, registry=CollectorRegistry(), clock=MonotonicClock())
            )
        yield found


async def measure(directory: Path, num_episodes: int, num_waiting: int, say: Callable[[str], None]) -> None:
    """Print the table."""
    settings = override_settings(
        Settings(),
        [
            f"model.path={directory}", f"run.directory={directory / 'run'}", "sampling.max_turn_tokens=256",
            "sampling.max_tokens=2048", f"rollout.max_running={max(num_waiting, AT_A_TIME)}",
        ],
    )  # fmt: skip
    costs: dict[str, Cost] = defaultdict(Cost)
    options = ServerOptions(model_path=directory, log_path=directory / "server.log", max_total_tokens=32768)
    async with EngineServer(options) as server:
        meter = Meter(server.pid)
        async with Engine(server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=64) as engine:
            await engine.pause("retract")
            await engine.update_weights_from_disk(directory, 1)
            await engine.resume()
            async with opened(directory, engine, settings) as kinds, asyncio.TaskGroup() as tasks:
                next_id = 1

                async def round_of(kind: str, into: str, number: int) -> None:
                    nonlocal next_id
                    before, begin = meter.read(), time.perf_counter()
                    tokens = await play(kinds[kind], number, next_id, tasks)
                    next_id += number
                    cost, after = costs[into], meter.read()
                    cost.seconds += time.perf_counter() - begin
                    cost.episodes, cost.tokens = cost.episodes + number, cost.tokens + tokens
                    for name, used in after.items():
                        cost.cpu_s[name] += used - before[name]

                for kind in kinds:  # the workers start, SGLang compiles
                    await play(kinds[kind], 2, next_id, tasks)
                    next_id += 2
                for _ in range(ROUNDS):
                    for kind in ("environment", *KINDS):
                        await round_of(kind, kind, num_episodes // ROUNDS)
                    for kind in BESIDE:
                        beside = tasks.create_task(play(kinds[kind], num_waiting, next_id, tasks, num_waiting))
                        next_id += num_waiting
                        # As many as last longer than the waiting does.
                        await round_of("environment", f"environment beside {num_waiting} that {kind}", num_episodes)
                        await beside
    for name, cost in costs.items():
        ratio = cost.seconds / cost.episodes / (costs["environment"].seconds / costs["environment"].episodes)
        say(f"{name:42s} {cost.line()}; {ratio:.2f} x the environment's time")


def save_talker(directory: Path, end_id: int) -> None:
    """A model whose turns end with ``end_id`` after TURN_TOKENS on average: one channel is the same in every context."""
    model = tiny_qwen3_moe(0)
    model.config.eos_token_id = model.generation_config.eos_token_id = end_id
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 6.0
        hidden = model.model(torch.arange(TINY_VOCAB_SIZE).reshape(8, -1)).last_hidden_state
        model.lm_head.weight.mul_(0.05)
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[end_id, 0] = math.log(TINY_VOCAB_SIZE / TURN_TOKENS) / float(hidden[..., 0].mean())
    model.save_pretrained(directory)


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=96, help="of each kind")
    parser.add_argument("--waiting", type=int, default=200, help="agents that wait in a tool beside the others")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tokenizer = chat_tokenizer(TINY_TEMPLATE, "<|end|>")
        tokenizer.save_pretrained(directory)
        save_talker(directory, tokenizer.eos_token_id)
        asyncio.run(measure(directory, arguments.episodes, arguments.waiting, print))


if __name__ == "__main__":
    main()
