"""SGLang and the learner, each alone on the cores that it has in the run."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

from benchmarks.pipeline.measures import CpuSample, TrainedBatch
from benchmarks.pipeline.processes import ProcessWatch, now
from benchmarks.pipeline.run import PINNED, cores_word
from benchmarks.pipeline.workload import Cores
from gspo_services.broker.store import LEDGER_FILE, Reader, reading
from gspo_services.rollout.sglang import Engine, EngineServer, GenerateRequest, SamplingParameters, ServerOptions
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.settings import Settings

BATCH_LINE: Final = re.compile(r"batch (\d+) ")
SAME_WEIGHTS: Final = "bit for bit the same"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt of the run, and the seed of its answer."""

    token_ids: list[int]
    seed: int


@dataclass(kw_only=True)
class Generated:
    """The answers that a client of SGLang received, with their times."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of completion tokens of each piece, in order."""
    answered: list[float] = field(default_factory=list)
    """When each request had its complete answer, in order."""
    end: float = 0.0
    """When the last request was sent: until then as many as possible were under way."""
    at_a_time: int = 1
    """Requests under way."""


def recorded_questions(directory: Path, batches: range) -> list[Question]:
    """Return the prompts of some of a run's batches, in order. Raises: NoLedger, StoreCorrupt."""
    questions = []
    with reading(directory) as connection:
        reader = Reader(directory / LEDGER_FILE, connection)
        for index in batches:
            for trajectory, payload in reader.batch(index)[1]:
                prompt = payload.token_ids[: payload.segments[0].num_tokens]
                questions.append(Question(token_ids=prompt.tolist(), seed=trajectory.trajectory_id))
    return questions


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Pin this thread, and the processes that it starts meanwhile, to these cores."""
    former = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, former)


@asynccontextmanager
async def sglang_server(settings: Settings, cores: frozenset[int], log_path: Path) -> AsyncIterator[str]:
    """Start the server that the run's rollout starts, without a rollout; yield its URL. Raises: ServerError."""
    rollout = settings.rollout
    server = EngineServer(
        ServerOptions(
            model_path=settings.model.path,
            log_path=log_path,
            dtype=settings.model.dtype,
            max_total_tokens=rollout.max_total_tokens,
            max_running=rollout.max_running,
            extra_args=tuple(rollout.server_args),
        )
    )
    with on_cores(cores):
        await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


async def ask(
    url: str, settings: Settings, questions: Sequence[Question], cores: frozenset[int], until: asyncio.Event | None = None
) -> Generated:
    """Ask all questions once, or in turns until ``until`` is set, as many at a time as the run has episodes under way.

    It uses the rollout's client, on SGLang's own cores, as the run's agent does. Raises: EngineError.
    """
    rollout, generated = settings.rollout, Generated(at_a_time=settings.rollout.max_running)
    tokenizer = ChatTokenizer(settings.model.path)
    sampling = SamplingParameters(
        max_new_tokens=settings.sampling.max_turn_tokens,
        temperature=settings.sampling.temperature,
        stop_token_ids=tuple(sorted(tokenizer.stop_ids)),
    )
    waiting = enumerate(questions if until is None else cycle(questions))

    async def work(engine: Engine) -> None:
        for number, question in waiting:
            if until is not None and until.is_set():
                return
            generated.end = now()
            seeded = SamplingParameters(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                stop_token_ids=sampling.stop_token_ids,
                seed=question.seed + number,
            )
            request = GenerateRequest(rid=f"alone-{number}", input_ids=question.token_ids, sampling=seeded)
            async with aclosing(engine.generate(request)) as pieces:
                async for piece in pieces:
                    generated.arrivals.append((now(), len(piece.token_ids)))
            generated.answered.append(now())

    engine = Engine(
        url,
        vocab_size=tokenizer.vocab_size,
        chunk_tokens=rollout.chunk_tokens,
        max_concurrency=rollout.max_running,
        stall_timeout_s=rollout.engine_timeout_s,
    )
    with on_cores(cores):
        async with engine:
            # Earlier questions must not be in the prefix cache.
            await engine.control("/flush_cache", {}, timeout_s=rollout.engine_timeout_s)
            async with asyncio.TaskGroup() as tasks:
                for number in range(rollout.max_running):
                    tasks.create_task(work(engine), name=f"client-{number}")
    return generated


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The learner alone."""

    batches: list[TrainedBatch]
    same_weights: bool
    """Its weights equal those that the run published, bit for bit, after every batch."""


async def replay(run: Path, out: Path, tokens: dict[int, int], num_batches: int, cores: frozenset[int]) -> Replayed:
    """Run ``gspo replay``: the learner's own service on the first batches of ``run``, read from its ledger.

    It makes the directory ``out``. ``tokens``: action tokens by batch. Raises: RuntimeError with the end of its output.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", PINNED, cores_word(cores), "gspo_services.runs.replay", str(run), "--out", str(out),
        "--batches", str(num_batches),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )  # fmt: skip
    assert process.stdout is not None
    batches, lines = [], []
    try:
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            lines.append(text)
            if matched := BATCH_LINE.match(text):
                index = int(matched.group(1))
                batches.append(TrainedBatch(index=index, time=now(), action_tokens=tokens[index]))
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if status not in (0, 1):
        raise RuntimeError(f"gspo replay {run} ended with status {status}:\n" + "\n".join(lines[-15:]))
    return Replayed(batches=batches, same_weights=any(line.startswith(SAME_WEIGHTS) for line in lines))


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Each half with the other's cores idle, and both at the same time.

    At the same time they share only the machine's caches and memory.
    """

    sglang: Generated
    learner: Replayed
    sglang_at_once: Generated
    learner_at_once: Replayed
    samples: list[CpuSample]
    """Samples of their processes over the whole time."""


async def measure_halves(
    settings: Settings,
    tokens: dict[int, int],
    questions: Sequence[Question],
    num_batches: int,
    cores: Cores,
    directory: Path,
) -> Halves:
    """Measure one after the other, then both.

    ``settings`` are those of the run, and its directory is read. ``num_batches`` of its batches are trained again.
    ``directory`` takes the output. Raises: ServerError, EngineError; RuntimeError when the replay fails.
    """
    run = settings.run.directory
    watch = ProcessWatch()
    async with sglang_server(settings, cores.rollout, directory / "sglang.log") as url, asyncio.TaskGroup() as watching:
        samples = watching.create_task(watch.run({}), name="watch")
        sglang = await ask(url, settings, questions, cores.rollout)
        learner = await replay(run, directory / "replay", tokens, num_batches, cores.learner)
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(ask(url, settings, questions, cores.rollout, ended), name="ask")
            learner_at_once = await replay(run, directory / "replay-at-once", tokens, num_batches, cores.learner)
            ended.set()
        samples.cancel()
    return Halves(
        sglang=sglang,
        learner=learner,
        sglang_at_once=asking.result(),
        learner_at_once=learner_at_once,
        samples=watch.samples,
    )
