"""Adapters (LoRA) of a server: which one a request has, and what SGLang says and does about them.

An adapter gets a name that no other has had: SGLang loads an unloaded adapter again, in silence, when a request names it.
The prefix cache is another for each load. Loading needs no pause. A request keeps the adapter that it began with, so all of
its tokens are of one version, which SGLang's answer does not name.
"""

from pathlib import Path
from typing import Final

import msgspec

from gspo_services.rollout.sglang.generation import Output
from gspo_services.rollout.sglang.http import EngineError, EngineHttp, decode_answer
from gspo_services.rollout.sglang.scoring import prompt_logprobs
from gspo_services.shared.weights import SLOT

_PARAMETERS: Final = ("model.", "lm_head")
"""Parts of the names of parameters, and of no slot's."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that a server has under ``name``: policy version ``version`` above the model of ``base_version``."""

    name: str
    version: int
    base_version: int
    """What the server calls the version of its own weights. It stays while adapters change."""

    def of_version(self, output: Output) -> Output:
        """The output of a request that has this adapter, under the adapter's version.

        Raises: ValueError when the server's own weights are no longer those that the adapter belongs to.
        """
        said = {output.server_version, *(version for version, *_ in output.spans or ())}
        if said != {self.base_version}:
            raise ValueError(
                f"the server's own weights are of version {sorted(said)}, and the adapter of version {self.version} belongs "
                f"to {self.base_version}: somebody else has updated it"
            )
        spans = output.spans and [(self.version, start, end) for _, start, end in output.spans]
        return msgspec.structs.replace(output, server_version=self.version, spans=spans)


class OpenRequest:
    """One HTTP request to generate. ``cut``: it was aborted so that its rest is asked for anew, unless it ``is_over``."""

    def __init__(self, adapter: Adapter | None) -> None:
        self.adapter = adapter
        self.cut = False
        self.is_over = False


class _Loaded(msgspec.Struct):
    loaded_adapters: dict[str, str] = {}


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _SlotRank(msgspec.Struct):
    checksums: dict[str, str]


class _Slots(msgspec.Struct):
    ranks: list[_SlotRank] = []


class EngineAdapters:
    """Loads and unloads the adapters of one server, and asks what it has."""

    def __init__(self, http: EngineHttp, load_timeout_s: float) -> None:
        self._http = http
        self._load_timeout_s = load_timeout_s

    async def load(self, name: str, path: Path) -> None:
        """Load peft's files in ``path``. Raises: EngineError, also when the server does not say that it has them."""
        body = {"lora_name": name, "lora_path": str(path)}
        content = await self._http.post("/load_lora_adapter", body, timeout_s=self._load_timeout_s)
        loaded = decode_answer(content, _Loaded).loaded_adapters
        if loaded.get(name) != str(path):
            raise EngineError(f"adapter {name} was to be loaded from {path}, and the server has {loaded}")

    async def unload(self, name: str) -> None:
        """Unload it; requests that have it must have ended: the server waits for them. Raises: EngineError."""
        await self._http.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=self._load_timeout_s)

    async def names(self) -> list[str]:
        """The adapters that the server has. Raises: EngineError."""
        return [each.id for each in (await self._http.get("/v1/models", _Models)).data if each.parent is not None]

    async def prompt_logprobs(self, name: str, token_ids: list[int]) -> list[float]:
        """Log-probs of ``token_ids[1:]`` with an adapter, at temperature 1; from then on it has a slot. Raises: EngineError.

        SGLang misreports the highest id of the vocabulary here.
        """
        return await prompt_logprobs(self._http, token_ids, adapter=name)

    async def slots(self, name: str) -> dict[str, str]:
        """The checksums of what lies in the slot of an adapter, by ``slot_name``; empty: this server does not say it.

        Raises: EngineError.
        """
        body = {"action": "checksum", "skip_tensor_list": list(_PARAMETERS)}
        answer = decode_answer(await self._http.post("/weights_checker", body, timeout_s=self._load_timeout_s), _Slots)
        return {
            key: checksum
            for rank in answer.ranks
            for key, checksum in rank.checksums.items()
            if key.startswith(f"{SLOT}{name}/")
        }
