"""What clients ask for, checked, as plain data: no sockets, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

CREATES: Final = 0
"""The seq_id of the call that makes a model, be it create_model or load_weights; the client counts its calls from 1."""
Kind = Literal[
    "create_model", "load_weights", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "refused"
]
"""``refused``: a call that nobody can read any more than its seq_id, which it spends; its body is the reason."""


class UserError(ValueError):
    """The call cannot be executed, and that is its sender's matter. Its text is what the client is told."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientDatum:
    """One sequence, and what its loss needs. All values are finite, all ids of the vocabulary."""

    tokens_N: NDArray[np.int64]
    targets: NDArray[np.int64]
    """[N], or [N, K]: any tokens, each predicted by the token at its place."""
    given: Mapping[str, NDArray[np.float32]]
    """By name, in the shape of ``targets``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainCall:
    """forward_backward, or forward."""

    datums: tuple[ClientDatum, ...]
    loss: str
    options: Mapping[str, float]
    forward_only: bool


class LoraRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``lora_config``, whose defaults ask for more than attention, which alone is adapted here: the log says so."""

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_unembed: bool = True
    train_attn: bool = True


class CreateModel(msgspec.Struct, frozen=True, kw_only=True):
    """create_model."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraRequest | None = None
    optimizer_config: dict[str, Any] = {}


class AdamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``adam_params``; the client's defaults."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def require_sound(self) -> None:
        """Raises: UserError that names the value."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            below_one = name.startswith("beta")
            if not (math.isfinite(value) and value >= 0 and (value < 1 or not below_one)):
                wanted = "at least 0 and below 1" if below_one else "finite and at least 0"
                raise UserError(f"adam_params: {name} is {value}; it must be {wanted}")


class OptimStep(msgspec.Struct, frozen=True, kw_only=True):
    """optim_step."""

    model_id: str
    seq_id: int
    adam_params: AdamRequest | None = None


class SaveWeights(msgspec.Struct, frozen=True, kw_only=True):
    """save_weights and save_weights_for_sampler."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True):
    """load_weights: into a model (model_id, seq_id), or as the first call of a new one (session_id, model_seq_id)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prompt: tokens alone."""

    tokens: list[int] = []
    type: str = "encoded_text"


class ClientPrompt(msgspec.Struct, frozen=True, kw_only=True):
    chunks: list[TokenChunk]


class SampleRules(msgspec.Struct, frozen=True, kw_only=True):
    """``sampling_params``. stop: None is the end of the text; [] is nothing; else texts or tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleCall(msgspec.Struct, frozen=True, kw_only=True):
    """asample."""

    sampling_session_id: str
    seq_id: int
    prompt: ClientPrompt
    sampling_params: SampleRules
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0

    @property
    def prompt_tokens(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


class SamplingSession(msgspec.Struct, frozen=True, kw_only=True):
    """create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The id of a model, which the client also composes itself."""
    return f"{session_id}:train:{model_seq_id}"


def sampler_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{sampling_session_seq_id}"
