"""The real training loop without a model: its thread and the loop take turns, so that it too lives in virtual time."""

import asyncio
import contextvars
import json
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gspo.model.packing import BatchGroup
from gspo.model.serving_layout import ServedParameter
from gspo_protocol.messages import Trained
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.broker.loop import BrokerLoop
from gspo_services.learner.broker.port import Answer, BatchAnnounced, PartArrived, Publication, ToBroker
from gspo_services.learner.broker.thread import BrokerThread
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.planned_batch import PlannedBatch
from gspo_services.learner.profiling import NO_PROFILE
from gspo_services.learner.token_dump import TokenDump
from gspo_services.learner.trainer import BatchReport
from gspo_services.shared.settings import Learner
from tests.simulation.audit.audit import Audit
from tests.simulation.episodes import VOCABULARY, tables_after, weights_after
from tests.simulation.loop import NOBODY, Process
from tests.support.broker.made_batches import spans_of
from tests.support.learner.served_ranges import ServedRanges

T = TypeVar("T")


class Killed(BaseException):
    """The process of this thread is gone."""


class Poisoned(RuntimeError):
    """What training a poisoned batch raises."""


class Turns:
    """Runs a blocking function in a thread. Either the thread moves or the loop does, never both."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._thread_may = threading.Semaphore(0)
        self._loop_may = threading.Semaphore(0)
        self._asked: Coroutine[Any, Any, Any] | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._over = False

    async def run(self) -> None:
        """Run until the function returns. Raises: what it raises. When cancelled, the function sees ``Killed``."""
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._body,), name="simulated-learner", daemon=True)
        thread.start()
        try:
            while True:
                self._loop_may.acquire()
                if self._over:
                    break
                asked, self._asked = self._asked, None
                assert asked is not None
                try:
                    self._answer, self._error = await asked, None
                except asyncio.CancelledError:
                    raise
                except Exception as error:  # noqa: BLE001 - handed to the thread that asked
                    self._answer, self._error = None, error
                self._thread_may.release()
        finally:
            if not self._over:
                self._error = Killed()
                self._thread_may.release()
                self._loop_may.acquire()
            thread.join()
        if self._error is not None:
            raise self._error

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Called by the function: have the loop run ``coroutine``, and wait for its result."""
        if isinstance(self._error, Killed):
            coroutine.close()
            raise self._error
        self._asked = coroutine
        self._loop_may.release()
        self._thread_may.acquire()
        if self._error is not None:
            raise self._error
        answer: T = self._answer
        return answer

    def _body(self) -> None:
        error: BaseException | None = None
        try:
            self._function()
        except BaseException as raised:  # noqa: BLE001 - raised again in the loop
            error = raised
        self._error = None if isinstance(error, Killed) else error
        self._over = True
        self._loop_may.release()


class SimBrokerClient(BrokerThread):
    """``BrokerThread`` without the thread: the same calls, which take virtual time."""

    def __init__(self, loop: BrokerLoop, arrived: "asyncio.Queue[Answer]", audit: Audit) -> None:
        self._loop = loop
        self._arrived = arrived
        self._audit = audit
        self.turns: Turns
        self.trainer: SimTrainer
        self.taken: BatchAnnounced | None = None
        self.parts: list[PartArrived] = []
        """Of the batch that was taken last."""

    def tell(self, message: ToBroker) -> None:
        if isinstance(message, Trained) and message.skipped:
            # Only the audit sees that its history has a place for each batch: the weights do not change.
            self.trainer.history.append(())
        super().tell(message)

    def _next_arrival(self, timeout_s: float) -> Answer | None:
        try:
            taken = self._call(self._arrived.get(), timeout_s)
        except TimeoutError:
            return None
        if isinstance(taken, PartArrived):
            self.parts.append(taken)
        else:
            self.taken, self.parts = taken if isinstance(taken, BatchAnnounced) else None, []
        return taken

    def publish(self, publication: Publication) -> None:
        content = b"".join(piece.data.tobytes() for piece in publication.weights.pieces)

        def note(digest: str) -> None:
            publication.note_digest(digest)
            self._audit.serves(publication.policy_version, content)

        self._audit.passes("publishing")
        super().publish(replace(publication, note_digest=note))

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        async def within() -> T:
            async with asyncio.timeout(timeout_s):
                return await coroutine

        return self.turns.call(within())


class SimJob:
    """A thread's work as a task of the process."""

    def __init__(self, turns: Turns, task: "asyncio.Task[str | Exception]") -> None:
        self._turns = turns
        self._task = task

    def ended(self, timeout_s: float) -> bool:
        if not self._task.done():
            self._turns.call(asyncio.wait([self._task], timeout=timeout_s))
        return self._task.done()

    def result(self) -> str:
        result = self._task.result()
        if isinstance(result, Exception):
            raise result
        return result


class SimBackground:
    """The learner's ``Threads`` in virtual time; they end with the process."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self.turns: Turns

    def start(self, work: Callable[[], str]) -> SimJob:
        async def begin() -> "asyncio.Task[str | Exception]":
            return self._tasks.create_task(_result_of(work))

        return SimJob(self.turns, self.turns.call(begin()))


async def _result_of(work: Callable[[], str]) -> str | Exception:
    try:
        return await asyncio.to_thread(work)
    except Exception as error:  # noqa: BLE001 - raised in the training thread
        return error


class SimCopy:
    """A copy of the history."""

    def __init__(self, audit: Audit, history: list[tuple[int, ...]], noise: list[int], digest: str) -> None:
        self._audit = audit
        self._history = history
        self._noise = noise
        self._digest = digest

    def write(self, directory: Path) -> list[Path]:
        self._audit.passes("saving")
        directory.mkdir()
        (directory / "history.json").write_text(json.dumps(self._history), encoding="utf-8")
        (directory / "noise.json").write_text(json.dumps(self._noise), encoding="utf-8")
        return [directory / "history.json", directory / "noise.json"]

    def weights_digest(self) -> str:
        return self._digest


class _Config:
    def to_dict(self) -> dict[str, Any]:
        return {}


class _Model:
    config = _Config()
    generation_config = None
    dtype = torch.float32


class SimTrainer:
    """The learner's engine and its optimizer steps. Its state is the history of what it was trained on."""

    rank = 0
    world_size = 1
    model = _Model()
    vocabulary = VOCABULARY
    model_experts = None
    max_tokens_per_micro_batch = 4096
    sequence_parallel = 1
    shares_beginnings = False
    max_sequence_tokens = None
    profile = NO_PROFILE

    def __init__(
        self,
        process: Process,
        rng: random.Random,
        audit: Audit,
        *,
        batch_s: float,
        has_tables: bool,
        is_deterministic: bool,
    ) -> None:
        self._has_tables = has_tables
        self._is_deterministic = is_deterministic
        self._process = process
        self._rng = rng
        self._audit = audit
        self._batch_s = batch_s
        self.history: list[tuple[int, ...]] = []
        self.noise: list[int] = []
        """The rounding of each step, where the same batch does not give the same weights twice."""
        self.broker: SimBrokerClient

    def set_learning_rate(self, value: float) -> None:
        self._learning_rate = value

    def train(
        self, engine: LearnerEngine, batch: PlannedBatch, trackers: Trackers, token_dump: TokenDump | None = None
    ) -> BatchReport:
        groups = batch.rows.groups
        arrived = self.broker.taken
        assert arrived is not None
        assert sum(len(group.sequences_per_episode or ()) for group in groups) == len(arrived.batch.items)
        self._take_time(self._batch_s * self._rng.uniform(0.5, 1.5))
        poison = self._audit.poison.get(arrived.batch.index)
        if poison == "dies":
            self.broker.turns.call(self._die())
        if poison == "raises":
            raise Poisoned(f"batch {arrived.batch.index} is poison")
        self._choke(groups)
        self._audit.trains_with(arrived.batch, self._learning_rate, Learner().learning_rate)
        spans = spans_of(arrived.batch, [part.arrays for part in self.broker.parts])
        self._audit.happened["batch in several parts"] += len(self.broker.parts) > 1
        self._audit.trains(self.history, arrived.batch, arrived.arrays, spans, groups)
        self.history.append(tuple(item.trajectory_id for item in arrived.batch.items))
        if not self._is_deterministic:
            self.noise.append(self._rng.randrange(2**32))
        return BatchReport(metrics={"loss": 0.0})

    def _choke(self, groups: Sequence[BatchGroup]) -> None:
        """What a model, its packing or its loss would raise."""
        largest = max(int(sequence.loaded().token_ids.max()) for group in groups for sequence in group.sequences)
        if largest >= self.vocabulary:
            raise IndexError(f"index out of range in self: token {largest}")
        for advantage in ("sequence", "turn"):
            sequences_with_advantages(groups, AdvantageSettings(advantage=advantage))  # type: ignore[arg-type]

    # --- gspo_services.learner.checkpoints.format.CheckpointEngine ---

    def layout(self) -> dict[str, Any]:
        return {}

    def weights_digest(self) -> str:
        return repr(weights_after(self.history, self.noise))

    def save_state(self, directory: Path) -> list[Path]:
        written = self.copy_state(directory).write(directory)
        self._take_time(self._rng.uniform(0.05, 0.3))
        return written

    def copy_state(self, directory: Path) -> "SimCopy":
        self._audit.checkpoints(self.history, len(self.history))
        self._take_time(self._rng.uniform(0.01, 0.05))
        return SimCopy(self._audit, list(self.history), list(self.noise), self.weights_digest())

    def load_state(self, directory: Path) -> None:
        loaded = json.loads((directory / "history.json").read_text(encoding="utf-8"))
        self.history = [tuple(step) for step in loaded]
        self.noise = json.loads((directory / "noise.json").read_text(encoding="utf-8"))

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        self._take_time(0.01)

    # --- what else the service needs ------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return tensor.clone()

    def own_ranges(self, dtype: torch.dtype) -> ServedRanges:
        return ServedRanges(lambda: (ServedParameter.alone(*each) for each in self.serving_weights(dtype)))

    def version_probe(self, num_tokens: int) -> None:
        """Simulated engines have nothing to compare."""

    def serving_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        # By name, as the audit orders them.
        for name, table in tables_after(self.history) if self._has_tables else ():
            yield name, torch.from_numpy(table.view(np.int16)).view(torch.bfloat16)
        yield "weights", torch.tensor(weights_after(self.history, self.noise), dtype=torch.float32)

    async def _die(self) -> None:
        asyncio.get_running_loop().call_soon(self._audit.dies, self._process, context=NOBODY)
        await asyncio.sleep(1000.0)

    def _take_time(self, seconds: float) -> None:
        self.broker.turns.call(asyncio.sleep(seconds))
