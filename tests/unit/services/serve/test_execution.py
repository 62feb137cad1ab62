"""Accepted calls: each is executed once, in order, and its answer outlives the process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gspo_services.serve.calls import CREATES, AdamRequest, LoraRequest, TrainCall, UserError
from gspo_services.serve.execution import SNAPSHOT_CALLS, Execution
from gspo_services.serve.schema import ForwardBackwardOutput
from gspo_services.serve.table import CallTable, OtherCallError
from gspo_services.serve.wire import CallLimits
from tests.unit.services.serve.calls import request

MODEL = "s:train:0"
ADAM = {"learning_rate": 0.5}


class CountingModels:
    """A model is the history of what was done to it, in words; log-probs tell its length."""

    def __init__(self) -> None:
        self.done: dict[str, list[str]] = {}
        self.executed = 0

    def create(self, model_id: str, lora: LoraRequest) -> None:
        if lora.rank > 8:
            raise UserError("rank")
        self.done[model_id] = [f"rank {lora.rank}"]

    def train(self, model_id: str, call: TrainCall) -> tuple[list[Any], float]:
        self.executed += 1
        if call.options.get("clip_low_threshold") == 0.125:
            raise RuntimeError("no memory")
        self.done[model_id].append("train")
        return [np.float32([len(self.done[model_id])] * 3) for _ in call.datums], 1.0

    def step(self, model_id: str, adam: AdamRequest) -> dict[str, float]:
        adam.require_sound()
        self.done[model_id].append("step")
        return {"learning_rate": adam.learning_rate}

    def rank(self, model_id: str) -> int:
        return int(self.done[model_id][0].split()[1])

    def save_state(self, model_id: str, directory: Path, *, seq: int) -> None:
        directory.mkdir(parents=True)
        (directory / "state").write_bytes(msgspec.json.encode([seq, self.done[model_id]]))

    def save_adapter(self, model_id: str, directory: Path) -> None:
        directory.mkdir(parents=True)

    def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> int:
        seq, done = msgspec.json.decode((directory / "state").read_bytes())
        self.done[model_id] = list(done)
        return int(seq)


class Client:
    """Sends calls and waits for answers."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution

    async def send(self, seq: int, kind: Any, body: bytes, model: str = MODEL) -> str:
        return await self.execution.accept(model, seq, kind, body)

    async def get(self, seq: int, model: str = MODEL) -> Any:
        answer = await self.execution.answer(f"{model}:{seq}", 20.0)
        assert answer is not None
        return msgspec.json.decode(answer) if answer.startswith(b"{") else ForwardBackwardOutput.FromString(answer)

    async def create(self, rank: int = 4, model: str = MODEL, **fields: Any) -> Any:
        body = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": rank}, **fields}
        await self.send(CREATES, "create_model", msgspec.json.encode(body), model)
        return await self.get(CREATES, model)

    async def step(self, seq: int, **adam: Any) -> str:
        body = {"model_id": MODEL, "seq_id": seq, "adam_params": ADAM | adam}
        return await self.send(seq, "optim_step", msgspec.json.encode(body))

    async def train(self, seq: int, loss: str = "ppo", **options: float) -> str:
        message = request(loss)
        for name, value in options.items():
            message.loss_fn_config[name] = value
        return await self.send(seq, "forward_backward", message.SerializeToString())


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """A service in one directory: opening it again is a start after a kill, as nothing is saved at its end."""

    @asynccontextmanager
    async def open_(models: CountingModels | None = None) -> AsyncIterator[Client]:
        limits = CallLimits(vocabulary=100, longest=8)
        models = CountingModels() if models is None else models
        with closing(CallTable(tmp_path / "calls.sqlite")) as table, ThreadPoolExecutor(max_workers=1) as trainer:
            execution = Execution(table, models, trainer, directory=tmp_path, names=("tiny",), limits=limits)
            await asyncio.to_thread(execution.line_up)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(execution.run())
                yield Client(execution)
                running.cancel()

    return open_


async def test_calls_are_executed_by_number_and_once(opened: Callable[..., Any]) -> None:
    models = CountingModels()
    async with opened(models) as client:
        assert await client.create() == {"type": "create_model", "model_id": MODEL}
        assert await client.step(3) == f"{MODEL}:3"
        await client.train(2)
        await client.train(1)
        assert (await client.get(3)) == {"metrics": {"learning_rate": 0.5}}
        again = await client.train(1)
        first = (await client.get(1)).loss_fn_outputs[0].fields["logprobs"].data
        assert again == f"{MODEL}:1"
        assert np.frombuffer(first, np.float32)[0] == 2
        assert models.done[MODEL] == ["rank 4", "train", "train", "step"]
        with pytest.raises(OtherCallError, match=f"call 1 of {MODEL} was a forward_backward with another content"):
            await client.train(1, "gspo")


async def test_a_call_that_fails_spends_its_number_and_the_next_one_goes_on(opened: Callable[..., Any]) -> None:
    models = CountingModels()
    async with opened(models) as client:
        await client.create()
        await client.train(1, "stable_reinforce")
        await client.train(2, clip_low_threshold=0.125)
        await client.send(3, "optim_step", b'{"model_id": "s:train:0", "seq_id": 3, "adam_params": {"beta1": "x"}}')
        await client.step(4, beta2=1.0)
        await client.step(5)
        assert (await client.get(1))["category"] == "user"
        assert await client.get(2) == {"error": "RuntimeError: no memory", "category": "server"}
        assert (await client.get(3))["error"].startswith("optim_step: Expected `float`, got `str`")
        assert (await client.get(4))["error"] == "adam_params: beta2 is 1.0; it must be at least 0 and below 1"
        assert (await client.get(5))["metrics"] == {"learning_rate": 0.5}
        assert models.done[MODEL] == ["rank 4", "step"]


async def test_a_model_that_was_not_made_fails_its_calls(opened: Callable[..., Any]) -> None:
    async with opened() as client:
        assert (await client.create(rank=9))["error"] == "rank"
        await client.step(1)
        assert "was never made" in (await client.get(1))["error"]
        assert (await client.create(model="s:train:1", base_model="big"))[
            "error"
        ] == "base_model is 'big'; this service has tiny"
        assert "lora_config is missing" in (await client.create(model="s:train:2", lora_config=None))["error"]
        with pytest.raises(KeyError):
            await client.execution.answer(f"{MODEL}:9", 1.0)


async def test_after_a_kill_the_models_are_where_they_were_and_answers_stay(opened: Callable[..., Any]) -> None:
    first, second = CountingModels(), CountingModels()
    async with opened(first) as client:
        await client.create()
        await client.train(1)
        await client.step(2)
        told = (await client.get(1)).SerializeToString()
        await client.get(2)
        await client.train(4)  # Accepted, and not executed: its predecessor has not come.
    async with opened(second) as client:
        assert client.execution.knows(MODEL)
        await client.train(3)
        await client.get(4)
        assert (await client.get(1)).SerializeToString() == told
        assert second.done[MODEL] == [*first.done[MODEL], "train", "train"]


async def test_a_snapshot_spares_what_came_before_it(opened: Callable[..., Any]) -> None:
    first, second = CountingModels(), CountingModels()
    num_steps = SNAPSHOT_CALLS // 2 + 3
    async with opened(first) as client:
        await client.create()
        for step in range(num_steps):
            await client.train(2 * step + 1)
            await client.step(2 * step + 2)
        await client.get(2 * num_steps)
    async with opened(second) as client:
        await client.train(2 * num_steps + 1)
        await client.get(2 * num_steps + 1)
        assert second.done[MODEL] == [*first.done[MODEL], "train"]
        assert second.executed < num_steps
        assert client.execution.rank(MODEL) == 4


async def test_weights_have_a_name_once_and_others_load_them(opened: Callable[..., Any]) -> None:
    async with opened(models := CountingModels()) as client:
        await client.create()
        await client.train(1)
        body = msgspec.json.encode({"model_id": MODEL, "seq_id": 2, "path": "one"})
        await client.send(2, "save_weights", body)
        path = (await client.get(2))["path"]
        assert path == f"tinker://{MODEL}/weights/one"
        await client.send(3, "save_weights", body)
        assert "under which this model was saved before" in (await client.get(3))["error"]
        load = msgspec.json.encode({"path": path, "session_id": "s", "model_seq_id": 1, "optimizer": True})
        await client.send(CREATES, "load_weights", load, "s:train:1")
        assert (await client.get(CREATES, "s:train:1"))["model_id"] == "s:train:1"
        assert models.done["s:train:1"] == ["rank 4", "train"]
        await client.send(
            4, "save_weights_for_sampler", msgspec.json.encode({"model_id": MODEL, "seq_id": 4, "path": "a/b"})
        )
        assert "without /" in (await client.get(4))["error"]
        fields = {"model_id": MODEL, "seq_id": 5, "sampling_session_seq_id": 0}
        await client.send(5, "save_weights_for_sampler", msgspec.json.encode(fields))
        assert (await client.get(5))["sampling_session_id"] == "s:sample:0"
