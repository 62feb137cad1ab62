"""Executes accepted calls, and lets clients wait for their answers.

A call is committed before it is accepted. Its answer is committed before it is given. In between it may be executed twice,
because a kill loses the models in memory: the next process begins with each model's newest snapshot and executes the calls
since then again, in their order. The same calls give the same weights, bit for bit on the same machine, and an answer that
exists is compared with the one found now.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from gspo_services.serve.calls import (
    CREATES,
    AdamRequest,
    CreateModel,
    Kind,
    LoadWeights,
    LoraRequest,
    OptimStep,
    SaveWeights,
    TrainCall,
    UserError,
    sampler_id_of,
)
from gspo_services.serve.table import AcceptedCall, CallTable, SavedWeights, request_id_of
from gspo_services.serve.turns import MOST, Turns
from gspo_services.serve.wire import CallLimits, read_train_call, train_answer
from gspo_services.shared.runtime.errors import ServiceError

log = structlog.get_logger()
T = TypeVar("T")

SNAPSHOT_CALLS: Final = 64
"""Calls of a model between two snapshots: what is executed again after a kill, at most, and a little more."""
SNAPSHOTS: Final = "snapshots"
WEIGHTS: Final = "weights"


class Models(Protocol):
    """``gspo_services.serve.training.ClientModels``."""

    def create(self, model_id: str, lora: LoraRequest) -> None: ...
    def train(self, model_id: str, call: TrainCall) -> tuple[list[NDArray[np.float32]], float]: ...
    def step(self, model_id: str, adam: AdamRequest) -> dict[str, float]: ...
    def rank(self, model_id: str) -> int: ...
    def save_state(self, model_id: str, directory: Path, *, seq: int) -> None: ...
    def save_adapter(self, model_id: str, directory: Path) -> None: ...
    def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> int: ...


def failure(text: str, category: str = "user") -> bytes:
    """The answer to a call that failed; the client may go on after it."""
    return msgspec.json.encode({"error": text, "category": category})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Execution:
    """The order in which calls are executed, and their futures."""

    def __init__(
        self,
        table: CallTable,
        models: Models,
        trainer: Executor,
        *,
        directory: Path,
        names: tuple[str, ...],
        limits: CallLimits,
    ) -> None:
        """``trainer``: the only thread that uses ``models``. ``names``: those under which clients ask for the base model."""
        self._table, self._models, self._trainer = table, models, trainer
        self._directory, self._names, self._limits = directory, names, limits
        self._turns = Turns()
        self._work = asyncio.Event()
        self._answered: dict[str, asyncio.Event] = {}
        """Of calls that somebody waits for."""
        self._ranks: dict[str, int] = {}
        self._failed: set[str] = set()
        """Models that could not be made: their calls fail."""
        self._last: dict[str, str] = {}
        """By model: when its newest call came, since this process began."""
        self._began = _now()
        self._since: dict[str, int] = {}
        """By model: calls since its newest snapshot."""

    # Clients ---------------------------------------------------------------------------------------------------------

    def knows(self, model: str) -> bool:
        """Whether a call has made this model, or will."""
        return self._turns.knows(model)

    def num_waiting(self, model: str) -> int:
        """Calls of a model that are accepted and not executed."""
        return self._turns.waiting(model)

    def rank(self, model: str) -> int | None:
        """The rank of a model's adapter; None: it was not made, or not yet."""
        return self._ranks.get(model)

    def last_call(self, model: str) -> str:
        """When a model's newest call came, or this process began (UTC, ISO 8601)."""
        return self._last.get(model, self._began)

    async def accept(self, model: str, seq: int, kind: Kind, body: bytes) -> str:
        """Take a call once, durably; returns the id of its future. Raises: OtherCallError."""
        if await asyncio.to_thread(self._table.accept, model, seq, kind, body):
            self._turns.add(model, seq)
            self._last[model] = _now()
            self._work.set()
        return request_id_of(model, seq)

    async def answer(self, request_id: str, timeout_s: float) -> bytes | None:
        """Wait for the answer to a call; None: not within ``timeout_s``. Raises: KeyError for a call that is not there."""
        model, _, number = request_id.rpartition(":")
        seq = int(number) if number.isdigit() and len(number) < 10 else -1
        # First, so that an answer between the look and the wait is not missed.
        answered = self._answered.setdefault(request_id, asyncio.Event())
        there, answer = await asyncio.to_thread(self._table.answer_of, model, seq)
        if not there:
            self._answered.pop(request_id, None)
            raise KeyError(request_id)
        if answer is not None:
            self._tell(request_id)
            return answer
        try:
            async with asyncio.timeout(timeout_s):
                await answered.wait()
        except TimeoutError:
            return None
        return (await asyncio.to_thread(self._table.answer_of, model, seq))[1]

    def _tell(self, request_id: str) -> None:
        """Let those who wait for an answer look for it."""
        if (answered := self._answered.pop(request_id, None)) is not None:
            answered.set()

    # Execution -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Execute calls until cancelled.

        waits for:    accepted calls; the trainer's thread; the disk
        unblocked by: ``accept``
        Raises: ServiceError when an answer, or a snapshot, cannot be kept, or the models failed otherwise than by a call.
        """
        while True:
            model = self._turns.peek()
            if model is None:
                self._work.clear()
                await self._work.wait()
                continue
            await self._turn(model)
            self._turns.end_turn()

    async def _turn(self, model: str) -> None:
        for _ in range(MOST):
            seq = self._turns.take(model)
            if seq is None:
                return
            call = await asyncio.to_thread(self._table.call, model, seq)
            assert call is not None, "only calls of the table are lined up"
            answer = await self._in_trainer(lambda call=call: self._execute(call))  # type: ignore[misc]
            if call.answer is None:
                await asyncio.to_thread(self._table.answer, model, seq, answer)
            elif call.answer != answer:
                log.error("other_answer", request=call.request_id, kind=call.kind, meaning="executed again, it differs")
            self._tell(call.request_id)
            self._since[model] = self._since.get(model, 0) + 1
            if call.kind == "optim_step":
                # No gradients are added up now, so a snapshot needs none.
                if self._since[model] >= SNAPSHOT_CALLS and model not in self._failed:
                    await self._in_trainer(lambda seq=seq: self._snapshot(model, seq))  # type: ignore[misc]
                    self._since[model] = 0
                return

    async def _in_trainer(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._trainer, work)
        except OSError as error:
            raise ServiceError(f"{self._directory}: {error}; make room there, and start the service again") from error

    def line_up(self) -> None:
        """Line up what was accepted before, from each model's newest snapshot on. Once, before the first ``accept``."""
        first: dict[str, int] = {}
        for model, seq in self._table.numbers():
            if model not in first:
                first[model] = self._restore(model)
                self._turns.begin(model, first[model])
            self._turns.add(model, seq)

    def _restore(self, model: str) -> int:
        """Put the newest snapshot of a model into the models; returns the number of the call after it."""
        found = sorted(self._snapshots(model).glob("[0-9]*"))
        if not found:
            return CREATES
        seq = self._trainer.submit(self._models.load_state, model, found[-1], with_optimizer=True).result()
        self._ranks[model] = self._models.rank(model)
        log.info("model_restored", model=model, seq=seq)
        return seq + 1

    def _snapshot(self, model: str, seq: int) -> None:
        directory = self._snapshots(model)
        self._models.save_state(model, directory / f"{seq:010d}", seq=seq)
        for older in sorted(directory.glob("[0-9]*"))[:-1]:
            shutil.rmtree(older)

    def _snapshots(self, model: str) -> Path:
        return self._directory / SNAPSHOTS / _folder(model)

    def _execute(self, call: AcceptedCall) -> bytes:
        """Execute a call in the trainer's thread. Returns its answer, which says so where it failed."""
        try:
            if call.kind == "refused":
                raise UserError(call.body.decode())
            if call.seq != CREATES and call.model in self._failed:
                raise UserError(f"model {call.model} was never made, as its first call failed: make another")
            answer = self._by_kind[call.kind](call)
            if call.kind in ("create_model", "load_weights"):
                self._ranks[call.model] = self._models.rank(call.model)
            return answer
        except UserError as error:
            if call.seq == CREATES:
                self._failed.add(call.model)
            return failure(str(error))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return failure(f"{call.kind}: {error}")

    @property
    def _by_kind(self) -> Mapping[str, Callable[[AcceptedCall], bytes]]:
        return {
            "create_model": self._create,
            "load_weights": self._load,
            "forward_backward": self._train,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
        }

    def _create(self, call: AcceptedCall) -> bytes:
        request = msgspec.json.decode(call.body, type=CreateModel)
        if request.base_model not in self._names:
            raise UserError(f"base_model is {request.base_model!r}; this service has {', '.join(self._names)}")
        if request.lora_config is None:
            raise UserError("lora_config is missing: this service trains adapters; use create_lora_training_client")
        if (optimizer := request.optimizer_config.get("type", "adamw")) not in ("adam", "adamw"):
            raise UserError(f"optimizer_config: type is {optimizer!r}; this service has adamw")
        self._models.create(call.model, request.lora_config)
        return _encoded(type="create_model", model_id=call.model)

    def _train(self, call: AcceptedCall) -> bytes:
        try:
            logprobs, loss = self._models.train(call.model, read_train_call(call.body, self._limits))
        except RuntimeError as error:  # PyTorch's, such as no memory; the gradients are as before.
            log.exception("call_failed", request=call.request_id)
            return failure(f"{type(error).__name__}: {error}", "server")
        return train_answer(logprobs, loss)

    def _step(self, call: AcceptedCall) -> bytes:
        request = msgspec.json.decode(call.body, type=OptimStep)
        if request.adam_params is None:
            raise UserError("adam_params is missing; this service has no other optimizer")
        return _encoded(metrics=self._models.step(call.model, request.adam_params))

    def _save(self, call: AcceptedCall) -> bytes:
        request = msgspec.json.decode(call.body, type=SaveWeights)
        sampler = call.kind == "save_weights_for_sampler"
        name = request.path if request.path is not None else f"{call.seq:06d}"
        if not name or "/" in name or len(name) > 200:
            raise UserError(f"path is {name[:200]!r}; give a name of 1 to 200 characters without /")
        folder = f"{WEIGHTS}/{_folder(call.model)}/{call.seq:010d}"
        path = f"tinker://{call.model}/{'sampler_weights' if sampler else 'weights'}/{name}"
        # Otherwise a call that loads it would not be the same when it is executed again.
        if (former := self._table.saved(path)) is not None and former.directory != folder:
            raise UserError(f"path is {name!r}, under which this model was saved before; give another name")
        if not (self._directory / folder).exists():
            if sampler:
                self._models.save_adapter(call.model, self._directory / folder)
            else:
                self._models.save_state(call.model, self._directory / folder, seq=call.seq)
        rank = self._models.rank(call.model)
        self._table.name_saved(SavedWeights(path=path, directory=folder, model=call.model, rank=rank, sampler=sampler))
        if sampler and request.path is None:
            if request.sampling_session_seq_id is None:
                raise UserError("path and sampling_session_seq_id are missing: give one of them")
            session = sampler_id_of(call.model.partition(":train:")[0], request.sampling_session_seq_id)
            self._table.open_sampler(session, path)
            return _encoded(type=call.kind, sampling_session_id=session)
        return _encoded(type=call.kind, path=path)

    def _load(self, call: AcceptedCall) -> bytes:
        request = msgspec.json.decode(call.body, type=LoadWeights)
        saved = self._table.saved(request.path)
        if saved is None or saved.sampler:
            kind = "was saved to sample from; save_state saves what can be trained" if saved else "was never saved here"
            raise UserError(f"path is {request.path[:300]!r}, which {kind}")
        self._models.load_state(call.model, self._directory / saved.directory, with_optimizer=request.optimizer)
        return _encoded(type="load_weights", path=request.path, model_id=call.model)


def _folder(model: str) -> str:
    return model.replace(":", "-")


def _encoded(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)
