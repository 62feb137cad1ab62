"""The process of a reward model: shared by clients, and ended with whoever started it."""

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, UnprovenError
from gspo_services.tasks.reward_model import ModelScore, RewardModel, RewardModelOptions, client
from gspo_services.tasks.reward_model.client import model_environment
from gspo_services.tasks.reward_model.server import FAILED, TAKEN, serve
from gspo_services.tasks.reward_model.wire import address_of, packed, read_message
from tests.support.rewards.classifiers import official_score, save_classifier

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


def options_of(saved: Path) -> RewardModelOptions:
    return RewardModelOptions(path=str(saved), owner=str(saved))


def children() -> list[int]:
    """Processes of reward models that this one has started."""
    found = psutil.Process().children(recursive=True)
    return [child.pid for child in found if "gspo_services.tasks.reward_model" in child.cmdline()]


async def test_clients_share_one_process_which_ends_with_the_one_that_started_it(saved: Path) -> None:
    async with RewardModel(options_of(saved)) as first, RewardModel(options_of(saved)) as second:
        assert len(children()) == 1
        scores = [(await model.score([{"role": "user", "content": "x" * 7}])).score for model in (first, second)]
    assert scores == pytest.approx([official_score(saved, f"<|user|>{'x' * 7}<|end|>")] * 2, abs=1e-4)
    assert children() == []


async def test_files_that_are_no_model_are_said_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"reward.model: there is no .*nowhere/config.json"):
        async with RewardModel(options_of(tmp_path / "nowhere")):
            raise AssertionError("it has opened")


async def test_what_only_loading_shows_is_the_processs_last_word(tmp_path: Path) -> None:
    words: list[dict[str, Any]] = []
    status = await serve(options_of(save_classifier(tmp_path, template=None)), words.append)
    (said,) = words
    assert (status, 'has no chat template: set reward.model_input = "text"' in said["error"]) == (FAILED, True)


async def test_a_process_that_ends_while_it_starts_leaves_no_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "module_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    model = RewardModel(options_of(saved))
    with pytest.raises(ServiceError, match="does not start: its process ended while it started: exit status 3"):
        async with model:
            raise AssertionError("it has opened")
    assert not model._folder.exists()


async def test_a_model_that_does_not_load_once_is_no_proof(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """from gspo_services.tasks.worker.frames import FrameSocket
FrameSocket().send({"error": "no room on the GPU"})"""
    monkeypatch.setattr(client, "module_command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(UnprovenError, match="cannot be used: no room on the GPU"):
        async with RewardModel(options_of(saved)):
            raise AssertionError("it has opened")


async def test_a_request_that_a_process_took_along_is_sent_to_the_next(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    servers: list[asyncio.Server] = []

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        servers.pop().close()
        servers.append(await asyncio.start_unix_server(answer, address_of(options)))
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await read_message(reader)
        writer.write(packed({"score": float(len(asked["messages"]))}))
        await writer.drain()
        writer.close()

    servers.append(await asyncio.start_unix_server(end, address_of(options)))
    assert await RewardModel(options).score([{"role": "user", "content": "x"}]) == ModelScore(score=1.0)
    servers.pop().close()


async def test_a_second_process_leaves_the_name_to_the_first(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    words: list[dict[str, Any]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        taken.bind(address_of(options))
        assert (await serve(options, words.append), words) == (TAKEN, [{"taken": True}])


def test_the_process_sees_the_gpu_of_its_setting_and_no_key_of_ours() -> None:
    ours = {"CUDA_VISIBLE_DEVICES": "3", "OPENAI_API_KEY": "secret", "PATH": "/bin"}
    on_gpu = model_environment(ours, "cuda:5", Path("/tmp/x"))
    assert (on_gpu["CUDA_VISIBLE_DEVICES"], on_gpu["CUDA_DEVICE_ORDER"], on_gpu["PATH"]) == ("5", "PCI_BUS_ID", "/bin")
    assert model_environment(ours, "cpu", Path("/tmp/x"))["CUDA_VISIBLE_DEVICES"] == ""
    assert "OPENAI_API_KEY" not in on_gpu
