"""How a rollout starts: a stop while its engine is still starting."""

import asyncio
from pathlib import Path

from services.rollout.__main__ import run_rollout
from services.runtime.arguments import ProcessArguments
from services.runtime.settings import Model, Rollout, Settings
from tests.support.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model


async def test_a_stop_ends_a_rollout_whose_engine_is_not_there_yet(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    model = save_chat_model(tmp_path / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with server:
        settings = Settings(
            model=Model(path=model),
            rollout=Rollout(server_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", metrics_port=0),
        )
        stop = asyncio.Event()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(run_rollout(ProcessArguments(settings=settings, name="rollout-0", forwarded=()), stop))
            await asked.wait()
            stop.set()
