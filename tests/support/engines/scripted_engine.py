"""An engine without a model: each token depends on the tokens before it, and a test says where the engine stops."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from safetensors import deserialize

from gspo_protocol.messages import Probe, TensorInfo, VersionRun
from gspo_services.rollout.sglang import CACHE_MEMORY, WEIGHTS_MEMORY, RankSums
from gspo_services.rollout.sglang.client import EngineError
from gspo_services.rollout.sglang.engine_adapters import Adapter
from gspo_services.rollout.sglang.generation import FinishReason, GenerateRequest, OutputPiece
from gspo_services.rollout.sglang.server_info import RankChecksums, ServerInfo
from gspo_services.shared.sglang_sums import sum_parameters
from gspo_services.shared.weights.checksums import Checksum, sha256_checksum
from gspo_services.shared.weights.engine_parameters import merge
from gspo_services.shared.weights.patches import patch_file, sums_file

Loaded = tuple[TensorInfo, bytes]
KINDS = {"I32": "<i4", "I64": "<i8", "U16": "<u2", "U32": "<u4"}
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Hold:
    """A point at which the engine waits until ``go``; ``reached`` is set when it is there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()


def some_token(context: Sequence[int]) -> int:
    """A token below 256 that depends on all of its context."""
    return (sum(context) * 31 + len(context) * 17) % 251


def some_logprob(context: Sequence[int]) -> float:
    return -float((sum(context) + len(context)) % 61 + 1) / 64


class ScriptedEngine:
    """The part of ``Engine`` that the agent loop and the weight sync use.

    ``next_token`` maps all tokens so far to the next one. ``versions`` maps a length of the context to the version that
    makes the tokens from there on. A request is served ``piece_tokens`` at a time.
    """

    def __init__(self, next_token: Callable[[Sequence[int]], int] = some_token, *, piece_tokens: int = 4) -> None:
        self.next_token = next_token
        self.piece_tokens = piece_tokens
        self.version = 1
        self.versions: dict[int, int] = {}
        self.holds: dict[int, Hold] = {}
        self.failures: dict[int, Exception | Literal["abort"]] = {}
        self.most_tokens: int | None = None
        """It has room for so many tokens of an answer, whatever it is asked for."""
        self.pace_s = 0.0
        """Seconds of each piece."""
        self.requests: list[GenerateRequest] = []
        self.num_closed = 0
        self.stops_when_told = False
        """Whether ``stop_generating`` ends requests, also those at a hold."""
        self._stopped = False
        # Weights.
        self.paused = False
        self.calls: list[str] = []
        self.loaded: dict[str, tuple[TensorInfo, bytes]] = {}
        self.files: list[list[str]] = []
        """The names in each file that was loaded."""
        self.patches: list[list[str]] = []
        """The parameters in each patch that was taken."""
        self.abilities: list[str] = []
        self.info = ServerInfo(version="0", device="cpu", dtype="float32", tp_size=1, model_path="scripted")
        self.url = "http://scripted"
        self.moved = 0.0
        """How far its log-probs of a probe are from the learner's."""
        self.adapters: Any = None
        """What it does with adapters, by a test's own script."""
        self.refuse_patch: str = ""
        self.refuse_update: str = ""
        self.damage: Callable[[dict[str, tuple[TensorInfo, bytes]]], None] = lambda _: None
        self.checksum: Checksum = sha256_checksum
        self.num_checksums = 0
        """How often it was asked for them."""
        self.num_sums = 0
        self.ranks: list[dict[str, str]] = []
        """The checksums of each rank of a server that shares a model; none: of one rank, by what was loaded."""
        self.said_version: int | None = None
        self.memory = self
        self.released: set[str] = set()
        self.refuse_release: str = ""
        self.update_hold: Hold | None = None

    def hold_at(self, num_tokens: int) -> Hold:
        """Wait before the token at place ``num_tokens`` of a context."""
        self.holds[num_tokens] = Hold()
        return self.holds[num_tokens]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        self.requests.append(request)
        context = [int(token) for token in request.input_ids]
        asked = request.sampling.max_new_tokens
        most = asked if self.most_tokens is None else min(asked, self.most_tokens)
        held: list[tuple[int, float, int]] = []
        try:
            for made in range(1, most + 1):
                if len(context) in self.holds:
                    hold = self.holds[len(context)]
                    hold.reached.set()
                    await hold.go.wait()
                failure = self.failures.pop(len(context), None)
                if failure == "abort" or self._stopped:
                    yield _piece(held, "abort")
                    return
                if failure is not None:
                    raise failure
                self.version = self.versions.get(len(context), self.version)
                token = self.next_token(context)
                held.append((token, some_logprob(context), self.version))
                context.append(token)
                finish: FinishReason | None = None
                if token in request.sampling.stop_token_ids:
                    finish = "stop"
                elif made == most:
                    finish = "length"
                if finish is not None or len(held) == self.piece_tokens:
                    yield _piece(held, finish)
                    held = []
                    if self.pace_s:
                        await asyncio.sleep(self.pace_s)
                if finish is not None:
                    return
        finally:
            self.num_closed += 1

    async def stop_generating(self) -> None:
        if self.stops_when_told:
            self._stopped = True
            for hold in self.holds.values():
                hold.go.set()

    # Weights -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        assert not self.released
        self.paused = False

    async def release_memory(self) -> None:
        self.calls.append("release")
        assert self.paused, "SGLang ends itself when something runs"
        if self.refuse_release:
            raise EngineError(self.refuse_release)
        self.released = {WEIGHTS_MEMORY, CACHE_MEMORY}
        self.loaded = {name: (info, bytes(len(data))) for name, (info, data) in self.loaded.items()}

    async def take_back(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")
        self.released.discard(tag)

    async def update_weights_from_disk(
        self, path: Path, version: int, *, check: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.calls.append(f"update {version}")
        assert self.paused
        assert WEIGHTS_MEMORY not in self.released
        if self.update_hold is not None:
            self.update_hold.reached.set()
            await self.update_hold.go.wait()
        if self.refuse_update:
            raise EngineError(self.refuse_update)
        # Tensors that are not in the file stay, as in SGLang.
        file = {name: (info, data) for name, info, data in read_directory(path)}
        self.files.append(list(file))
        self.loaded |= file
        self.damage(self.loaded)
        self.version = version
        if self.said_version not in (None, version):
            raise EngineError(f"version {version} was loaded, but the server reports {self.said_version}")
        if check is not None:
            await check()

    async def patch_weights(self, path: Path, version: int, *, check: Callable[[], Awaitable[None]] | None = None) -> None:
        self.calls.append(f"patch {version}")
        assert self.paused
        if self.refuse_patch:
            raise EngineError(self.refuse_patch)
        self.loaded, names = patched(self.loaded, path)
        self.patches.append(names)
        self.damage(self.loaded)
        self.version = version
        if check is not None:
            await check()

    async def weight_version(self) -> int | None:
        return self.version if self.said_version is None else self.said_version

    async def weights_checksums(self) -> list[RankChecksums]:
        assert WEIGHTS_MEMORY not in self.released, "there is nothing to read: CUDA ends the server"
        self.num_checksums += 1
        if self.ranks:
            return [RankChecksums(checksums=each, rank=rank) for rank, each in enumerate(self.ranks)]
        made = {name: self.checksum(parameter.parts) for name, parameter in merge(self.loaded.values()).items()}
        return [RankChecksums(checksums=made)]

    async def weight_sums(self, path: Path) -> list[RankSums]:
        """By the loader of real servers, on what it has loaded."""
        assert WEIGHTS_MEMORY not in self.released
        self.num_sums += 1
        state = {
            name: torch.frombuffer(bytearray(b"".join(parameter.parts)), dtype=torch.uint8)
            for name, parameter in merge(self.loaded.values()).items()
        }
        sizes, others = sum_parameters(state, path)
        sums = np.frombuffer((path / sums_file(0)).read_bytes(), dtype="<u8")
        return [RankSums(sizes=sizes, sums=sums, others=others)]

    async def server_info(self) -> ServerInfo:
        loaders = [*(self.info.custom_weight_loader or ()), *self.abilities]
        return replace(self.info, tp_size=max(self.info.tp_size, len(self.ranks)), custom_weight_loader=loaders)

    async def probed(self, probe: Probe) -> list[float]:
        self.calls.append("probe")
        return [logprob + self.moved for logprob in probe.logprobs]

    def serve(self, adapters: Mapping[str, Adapter]) -> None:
        self.adapters.serve(adapters)

    def uses(self, name: str) -> bool:
        return name in self.adapters.used

    async def cut(self, name: str) -> bool:
        return bool(self.adapters.cut(name))


def patched(loaded: dict[str, Loaded], path: Path) -> tuple[dict[str, Loaded], list[str]]:
    """The tensors after a patch, and the names of the parameters that it changes. Found without the code under test."""
    arrays = {
        name: np.frombuffer(entry["data"], KINDS[entry["dtype"]])
        for name, entry in deserialize((path / patch_file(0)).read_bytes())
    }
    changed = dict(loaded)
    names = [name.removesuffix(".indices") for name in arrays if name.endswith(".indices")]
    for name, parameter in merge(loaded.values()).items():
        if name in names:
            values = arrays[f"{name}.values"]
            elements = np.frombuffer(b"".join(parameter.parts), values.dtype).copy()
            elements[arrays[f"{name}.indices"]] = values
            rest = elements.tobytes()
            for tensor in parameter.tensors:
                info, data = loaded[tensor]
                changed[tensor], rest = (info, rest[: len(data)]), rest[len(data) :]
    return changed, names


def read_directory(path: Path) -> list[tuple[str, TensorInfo, bytes]]:
    """The tensors of all files in a directory."""
    return [tensor for file in sorted(path.iterdir()) for tensor in read_tensors(file)]


def read_tensors(path: Path) -> list[tuple[str, TensorInfo, bytes]]:
    """The tensors of a safetensors file, read by the format's own library."""
    tensors = []
    for name, entry in deserialize(path.read_bytes()):
        data = bytes(entry["data"])
        info = TensorInfo(name, DTYPE_NAMES[entry["dtype"]], list(entry["shape"]), 0, len(data), "0" * 64)
        tensors.append((name, info, data))
    return tensors


def _piece(tokens: Sequence[tuple[int, float, int]], finish: FinishReason | None) -> OutputPiece:
    runs: list[VersionRun] = []
    for _, _, version in tokens:
        if runs and runs[-1].version == version:
            runs[-1] = VersionRun(version, runs[-1].num_tokens + 1)
        else:
            runs.append(VersionRun(version, 1))
    return OutputPiece(
        token_ids=np.array([token for token, _, _ in tokens], dtype=np.int32),
        logprobs=np.array([logprob for _, logprob, _ in tokens], dtype=np.float32),
        version_runs=runs,
        finish_reason=finish,
    )
