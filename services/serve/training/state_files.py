"""A client's model on disk: its state, to train on, and its adapter in peft's files, to sample from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo.files import make_partial_directory, publish_directory
from gspo.model.lora import lora_name, part_of
from gspo_protocol.messages import AdapterInfo
from gspo_services.learner.engine import MOMENTS, ClientState
from gspo_services.shared.weights import MODULES, PEFT_PREFIX, peft_config

_STATE: Final = "state.safetensors"
_ABOUT: Final = "state.json"
_ADAPTER: Final = "adapter_model.safetensors"
_CONFIG: Final = "adapter_config.json"


class StateAbout(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a state beside its tensors."""

    rank: int
    scale: float
    num_steps: int
    seq: int
    """The number of the last call that is in it."""


def write_state(directory: Path, names: list[str], state: ClientState, *, rank: int, seq: int) -> None:
    """Write a state without its gradients; it is there whole or not at all. Raises: OSError."""
    tensors: dict[str, Tensor] = {}
    for name, value, moments in zip(names, state.values, state.moments, strict=True):
        tensors |= {f"{name}/weight": value, **{f"{name}/{kind}": each for kind, each in zip(MOMENTS, moments, strict=True)}}
    partial = make_partial_directory(directory)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial / _STATE)
    about = StateAbout(rank=rank, scale=state.scale, num_steps=state.num_steps, seq=seq)
    (partial / _ABOUT).write_bytes(msgspec.json.encode(about))
    publish_directory(partial, directory)


def read_state(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[ClientState, StateAbout]:
    """Read what ``write_state`` wrote. Raises: ValueError when it is that of another model; OSError."""
    about = msgspec.json.decode((directory / _ABOUT).read_bytes(), type=StateAbout)
    tensors = load_file(directory / _STATE)
    found = {name: tuple(tensors[f"{name}/weight"].shape) for name in shapes if f"{name}/weight" in tensors}
    if found != dict(shapes):
        raise ValueError(f"{directory} has another model's weights; start the service with the model and lora.rank it had")
    state = ClientState(
        values=[tensors[f"{name}/weight"] for name in shapes],
        moments=[tuple(tensors[f"{name}/{kind}"] for kind in MOMENTS) for name in shapes],
        gradients=[None] * len(shapes),
        num_steps=about.num_steps,
        scale=about.scale,
    )
    return state, about


def without_optimizer(state: ClientState) -> ClientState:
    """The same weights before any optimizer step."""
    state.moments = [tuple(torch.zeros_like(each) for each in moments) for moments in state.moments]
    state.num_steps = 0
    return state


def write_adapter(directory: Path, names: list[str], state: ClientState, *, rank: int) -> None:
    """Write peft's files of the adapter, at its own rank; there whole or not at all. Raises: OSError."""
    partial = make_partial_directory(directory)
    tensors = {
        PEFT_PREFIX + lora_name(name): part_of(value, name, 0, rank).contiguous()
        for name, value in zip(names, state.values, strict=True)
    }
    save_file(tensors, partial / _ADAPTER)
    info = AdapterInfo(
        rank=rank, alpha=state.scale * rank, modules=list(MODULES), base_digest="", probe_ids=[], probe_logprobs=[]
    )
    (partial / _CONFIG).write_bytes(msgspec.json.encode(peft_config(info)))
    publish_directory(partial, directory)
