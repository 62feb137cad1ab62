"""The models of clients as adapters of one base, each in the engine for its turn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.token_losses import token_loss
from gspo_services.learner.engine import AdamValues, ClientState, ClientSteps, LearnerEngine
from gspo_services.learner.start import engine_settings_of
from gspo_services.serve.calls import AdamRequest, LoraRequest, TrainCall, UserError
from gspo_services.serve.training.rows import DatumRow, rows_of
from gspo_services.serve.training.state_files import read_state, without_optimizer, write_adapter, write_state
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

log = structlog.get_logger()

_MAX_SEED: Final = 2**63 - 1


@dataclass(kw_only=True)
class _Model:
    rank: int
    state: ClientState | None
    """None while it is in the engine."""


class ClientModels:
    """All models of clients. Used by one thread alone, which also made it."""

    def __init__(
        self, steps: ClientSteps, *, max_rank: int, alpha: float, max_tokens: int, close: Callable[[], None]
    ) -> None:
        """``alpha``: B A is multiplied by alpha / rank. ``max_tokens``: of one pass."""
        self._steps = steps
        self._names = list(steps.shapes)
        self._max_rank, self._alpha, self._max_tokens = max_rank, alpha, max_tokens
        self._models: dict[str, _Model] = {}
        self._resident = ""
        self.close = close

    def create(self, model_id: str, lora: LoraRequest) -> None:
        """Make a model that is the base until its first step. Raises: UserError."""
        if not 1 <= lora.rank <= self._max_rank:
            raise UserError(f"lora_config: rank is {lora.rank}; this service has ranks 1 to {self._max_rank} (lora.rank)")
        if not lora.train_attn:
            raise UserError("lora_config: train_attn is false, and this service adapts attention; leave it true")
        if lora.train_mlp or lora.train_unembed:
            log.warning("adapts_attention_alone", model=model_id, asked=lora.train_mlp, unembed=lora.train_unembed)
        seed = int.from_bytes(hashlib.blake2b(model_id.encode(), digest_size=7).digest()) if lora.seed is None else lora.seed
        if not 0 <= seed <= _MAX_SEED:
            raise UserError(f"lora_config: seed is {seed}; it must be in [0, 2^63)")
        # A model of a lower rank has zeros in the rest, which stay 0: their gradients are.
        generator = torch.Generator().manual_seed(seed)
        values = [torch.zeros(shape) for shape in self._steps.shapes.values()]
        for name, value in zip(self._names, values, strict=True):
            if ".lora_A." in name:
                bound = 1 / math.sqrt(value.shape[1])  # peft's: Kaiming's with a = sqrt(5).
                value[: lora.rank].uniform_(-bound, bound, generator=generator)
        self._keep(model_id, lora.rank, without_optimizer(_state(values, self._alpha / lora.rank)))

    def train(self, model_id: str, call: TrainCall) -> tuple[list[NDArray[np.float32]], float]:
        """Add the gradients of a call, all of them or none. Returns log-probs of each datum's targets, and its loss.

        Raises: UserError when the loss or a log-prob is not finite.
        """
        self._enter(model_id)
        before = None if call.forward_only else self._steps.gradients()
        logprobs, losses = [], []
        try:
            for each in rows_of(call.datums, self._max_tokens):
                loss, found = self._pass(each, call)
                losses.append(loss)
                logprobs += found
        except BaseException:
            if before is not None:
                self._steps.restore(before)
            raise
        return logprobs, math.fsum(losses)

    def _pass(self, each: DatumRow, call: TrainCall) -> tuple[float, list[NDArray[np.float32]]]:
        logprobs_M = self._steps.logprobs(each.row, with_gradient=not call.forward_only)
        losses: list[Tensor] = []
        found = []
        for place, datum in enumerate(each.datums):
            own = logprobs_M[each.offsets[place] : each.offsets[place + 1]].view(datum.targets.shape)
            given = {name: torch.from_numpy(values.copy()).to(own.device) for name, values in datum.given.items()}
            losses.append(token_loss(call.loss, own, given, call.options))
            found.append(own.detach().cpu().numpy())
            if not (math.isfinite(float(losses[-1].detach())) and np.isfinite(found[-1]).all()):
                raise UserError(
                    f"datum {each.indices[place]}: the loss is {float(losses[-1].detach())}, and nothing was added to the "
                    "gradients; are its logprobs those of these tokens?"
                )
        total = torch.stack(losses).sum()
        if not call.forward_only:
            self._steps.backward(total)
        return float(total.detach()), found

    def step(self, model_id: str, adam: AdamRequest) -> dict[str, float]:
        """Make an optimizer step on the gradients since the last one. Raises: UserError when they are not finite."""
        adam.require_sound()
        self._enter(model_id)
        values = AdamValues(
            learning_rate=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_norm=adam.grad_clip_norm,
        )
        try:
            norm = self._steps.step(values)
        except ValueError as error:
            raise UserError(str(error)) from error
        return {"grad_norm": norm, "learning_rate": adam.learning_rate}

    def rank(self, model_id: str) -> int:
        """The rank of a model's adapter."""
        return self._models[model_id].rank

    def save_state(self, model_id: str, directory: Path, *, seq: int) -> None:
        """Write a model's weights and optimizer, as of its call ``seq``. Raises: OSError."""
        write_state(directory, self._names, self._state(model_id), rank=self.rank(model_id), seq=seq)

    def save_adapter(self, model_id: str, directory: Path) -> None:
        """Write a model's adapter, to sample from. Raises: OSError."""
        write_adapter(directory, self._names, self._state(model_id), rank=self.rank(model_id))

    def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> int:
        """Make a model of what ``save_state`` wrote, in the place of the one of this id. Returns its ``seq``.

        Raises: UserError when it is another base model's; OSError.
        """
        try:
            state, about = read_state(directory, self._steps.shapes)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._keep(model_id, about.rank, state if with_optimizer else without_optimizer(state))
        return about.seq

    def _keep(self, model_id: str, rank: int, state: ClientState) -> None:
        if self._resident == model_id:
            self._resident = ""
        self._models[model_id] = _Model(rank=rank, state=state)

    def _enter(self, model_id: str) -> None:
        """Put a model into the engine, and take out the one that is there."""
        if self._resident == model_id:
            return
        model = self._models[model_id]
        assert model.state is not None, "a model that is not in the engine has its state"
        if self._resident:
            self._models[self._resident].state = self._state(self._resident)
        self._resident = ""
        self._steps.put_in(model.state)
        model.state, self._resident = None, model_id

    def _state(self, model_id: str) -> ClientState:
        model = self._models[model_id]
        if model.state is not None:
            return model.state
        return self._steps.take_out(self._alpha / model.rank)


def _state(values: Sequence[Tensor], scale: float) -> ClientState:
    return ClientState(
        values=list(values),
        moments=[(each, each) for each in values],
        gradients=[None] * len(values),
        num_steps=0,
        scale=scale,
    )


def open_client_models(settings: Settings) -> ClientModels:
    """Load the base model into an engine for clients. Raises: ConfigurationError."""
    try:
        engine = LearnerEngine.create(
            settings.model.path, engine_settings_of(settings, "cuda" if torch.cuda.is_available() else "cpu")
        )
        steps = engine.client_steps()
    except ValueError as error:
        raise ConfigurationError(f"the model in {settings.model.path} cannot be served to clients: {error}") from error
    return ClientModels(
        steps,
        max_rank=settings.lora.rank,
        alpha=settings.lora.alpha,
        max_tokens=settings.learner.max_tokens_per_micro_batch,
        close=engine.close,
    )
