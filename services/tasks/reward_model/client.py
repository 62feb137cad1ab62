"""A rollout's end of a reward model: asks its process, and starts that where there is none."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import structlog

from gspo.tasks.environments import ChatMessage
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, UnprovenError
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.tasks.environments import FailureReason
from gspo_services.tasks.reward_model.files import require_classifier
from gspo_services.tasks.reward_model.options import RewardModelOptions
from gspo_services.tasks.reward_model.wire import address_of, packed, read_message, require_own
from gspo_services.tasks.reward_worker.isolation import worker_environment
from gspo_services.tasks.supervised import SupervisedProcess
from gspo_services.tasks.worker.frames import MAX_MESSAGE_BYTES

log = structlog.get_logger(__name__)

_START_S: Final = 900.0
"""The limit for a process to load its model."""
_MOST_TRIES: Final = 4
"""How often a request is sent before it fails: each time the process has ended meanwhile."""
_PAUSE_S: Final = 0.2
_AWAY = (ConnectionError, BlockingIOError)
_STDERR: Final = 2


class ModelScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model says of one conversation."""

    score: float | None = None
    """Its logit, finite; None when there is none."""
    is_cut: bool = False
    """The conversation was longer than the model takes, and its end was not read (``reward.model_too_long``)."""
    failure: FailureReason | None = None
    detail: str = ""


class StartError(Exception):
    """A process cannot serve the model."""


class RewardModel:
    """Scores conversations by the model's process, which all rollouts of a run on one machine share.

    Whoever finds no process starts one, as a child that ends with it; the socket's name goes to one of them. If the process
    ends, its requests are sent again to the next one. Use it as an asynchronous context manager.
    """

    def __init__(self, options: RewardModelOptions) -> None:
        self._options = options
        self._address = address_of(options)
        self._folder = Path(tempfile.gettempdir()) / self._address[1:]
        """For files of libraries: torch makes folders when it is imported. One name, so that a killed rollout leaves one."""
        self._child: SupervisedProcess | None = None
        self._serves = False
        """The child has the socket's name."""
        self._starting = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> RewardModel:
        """Raises: ConfigurationError when the files are no reward model; ServiceError when it does not start."""
        try:
            require_classifier(Path(self._options.path))
        except ValueError as error:
            raise ConfigurationError(f"reward.model: {error}") from error
        try:
            async with asyncio.timeout(_START_S):
                await self._sent(packed({}))
        except TimeoutError as error:
            await self.close()
            raise ServiceError(f"the reward model {self._options.path} was not loaded within {_START_S:.0f} s") from error
        except StartError as error:
            await self.close()
            raise UnprovenError(f"reward.model: {self._options.path} cannot be used: {error}") from error
        except _AWAY as error:
            await self.close()
            raise ServiceError(f"the reward model {self._options.path} does not start: {error}") from error
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the process that this client has started; others start their own."""
        self._closed = True
        await self._end_child()

    async def score(self, messages: list[ChatMessage]) -> ModelScore:
        """The model's score of a conversation that ends with the policy's answer, or why there is none.

        waits for:    the model, and others' conversations before
        unblocked by: ``reward.model_deadline_s``; the end of the process, after which a new one is asked
        """
        try:
            request = packed({"messages": messages})
        except (TypeError, ValueError, OverflowError) as error:
            return _failed("bad_job", f"the conversation is not plain data: {error}")
        if len(request) > MAX_MESSAGE_BYTES:
            return _failed("too_large", f"a conversation of {len(request)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        try:
            async with asyncio.timeout(self._options.deadline_s):
                said = await self._sent(request)
            return msgspec.convert(said, ModelScore)
        except TimeoutError:
            return _failed("deadline", f"the reward model did not answer within {self._options.deadline_s} s")
        except (StartError, *_AWAY) as error:
            return _failed("closed" if self._closed else "crashed", f"the reward model has ended: {error}")
        except msgspec.ValidationError as error:
            return _failed("crashed", f"the reward model's process sent what is no score: {error}")

    async def _sent(self, request: bytes) -> dict[str, Any]:
        """The answer of the process, or of one that followed it. Raises: StartError and those of _AWAY."""
        tries = 0
        while True:
            try:
                try:
                    return await self._answer(request)
                except ConnectionRefusedError:
                    # Nobody has the name: no request was lost.
                    await self._start()
            except _AWAY as error:
                tries += 1
                log.warning("reward_model_gone", reason=str(error) or type(error).__name__, tries=tries)
                if tries >= _MOST_TRIES:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def _answer(self, request: bytes) -> dict[str, Any]:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.setblocking(False)
            await asyncio.get_running_loop().sock_connect(peer, self._address)
            require_own(peer)
            reader, writer = await asyncio.open_unix_connection(sock=peer)
        except BaseException:
            peer.close()
            raise
        try:
            writer.write(request)
            return await read_message(reader)
        finally:
            writer.close()

    async def _start(self) -> None:
        """Start a process unless there is one by now. Raises: StartError, ConnectionError."""
        async with self._starting:
            if self._closed:
                raise ConnectionAbortedError("closed")
            if await self._is_there():
                return
            await self._end_child()
            said = await self._started()
        self._serves = "taken" not in said
        if "error" in said:
            raise StartError(said["error"])
        if not self._serves:
            await asyncio.sleep(_PAUSE_S)
        else:
            log.info("reward_model_ready", path=self._options.path, pid=said.get("pid"), device=self._options.device)

    async def _is_there(self) -> bool:
        """Whether somebody has the name: another task or another client may have started a process meanwhile."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(peer, self._address)
            except OSError as error:
                return not isinstance(error, ConnectionRefusedError)
        return True

    async def _started(self) -> dict[str, Any]:
        arguments = msgspec.json.encode(self._options).decode()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._child = child = SupervisedProcess(output=_STDERR)
        await child.start_to_talk(
            module_command("gspo_services.tasks.reward_model", str(os.getpid()), arguments),
            model_environment(os.environ, self._options.device, self._folder),
        )
        try:
            said: dict[str, Any] = msgspec.json.decode(await child.receive())
        except ConnectionError as error:
            await child.status()
            await self._end_child()
            raise ConnectionAbortedError(f"its process ended while it started: {child.ended_as()}") from error
        return said

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        await child.end()
        # The folder is that of whoever has the name.
        if self._serves or not await self._is_there():
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def model_environment(environment: Mapping[str, str], device: str, folder: Path) -> dict[str, str]:
    """The variables of the process: those that an interpreter needs, no network for libraries, and one GPU at most.

    GPUs are counted as ``nvidia-smi`` does, whatever this process may see.
    """
    kind, _, number = device.partition(":")
    gpu = (
        {"CUDA_VISIBLE_DEVICES": number, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if kind == "cuda"
        else {"CUDA_VISIBLE_DEVICES": ""}
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**worker_environment(environment, str(folder)), **offline, **gpu}


def _failed(reason: FailureReason, detail: str) -> ModelScore:
    return ModelScore(failure=reason, detail=detail)
