"""A model in this process, on the CPU: slow, and without a server. Only this module of its room loads torch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers.utils import logging

from gspo.model_files.loading import load_converted, load_from_files
from gspo_protocol.messages import VersionRun
from gspo_services.rollout.sglang import EngineError, GenerateRequest, OutputPiece
from gspo_services.runs.local_play import VERSION


class TorchEngine:
    """A ``PolicyEngine`` that samples with transformers, a token at a time, from the whole distribution."""

    def __init__(self, directory: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        """Load the model. Raises: ValueError, OSError when the directory holds none that transformers can load."""
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        kind = getattr(torch, dtype)
        self._model = load_from_files(directory, kind, attention="sdpa")
        if self._model is None:
            self._model = load_converted(directory, kind, attention="sdpa")
        self._model.eval()

    async def stop_generating(self) -> None:
        """Nothing is under way that a cancellation does not end."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """See ``Engine.generate``; log-probs are at the request's temperature, or at 1 where it is 0.

        Raises: EngineError when the model fails, as for more tokens than it has positions.
        """
        sampling = _Sampling(self._model, request)
        most = request.sampling.max_new_tokens
        for made in range(1, most + 1):
            try:
                # In a thread: agents and their deadlines go on meanwhile.
                token, logprob = await asyncio.to_thread(sampling.next_token)
            except (RuntimeError, IndexError, ValueError) as error:
                raise EngineError(f"the model has failed: {type(error).__name__}: {error}") from error
            stopped = token in request.sampling.stop_token_ids
            yield OutputPiece(
                token_ids=np.array([token], dtype=np.int32),
                logprobs=np.array([logprob], dtype=np.float32),
                version_runs=[VersionRun(VERSION, 1)],
                finish_reason="stop" if stopped else "length" if made == most else None,
            )
            if stopped:
                return


class _Sampling:
    """One answer while it is sampled."""

    def __init__(self, model: Any, request: GenerateRequest) -> None:
        self._model = model
        self._temperature = request.sampling.temperature
        self._generator = torch.Generator()
        if request.sampling.seed is not None:
            self._generator.manual_seed(request.sampling.seed)
        self._cache: Any = None
        self._new_ids = [int(token) for token in request.input_ids]
        # Logits of a long prompt take gigabytes, and only the last ones are asked for.
        takes = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if takes else {}

    def next_token(self) -> tuple[int, float]:
        """Sample one more token. Returns it with its log-prob."""
        with torch.inference_mode():
            ids_1T = torch.tensor([self._new_ids])
            out = self._model(input_ids=ids_1T, past_key_values=self._cache, use_cache=True, **self._last_only)
            self._cache = out.past_key_values
            logprobs_V = torch.log_softmax(out.logits[0, -1].float() / (self._temperature or 1.0), dim=-1)
            if self._temperature:
                token = int(torch.multinomial(logprobs_V.exp(), 1, generator=self._generator).item())
            else:
                token = int(logprobs_V.argmax().item())
        self._new_ids = [token]
        return token, float(logprobs_V[token].item())
