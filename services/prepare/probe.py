"""``gspo check CONFIG --probe``: the configured server and the learner's model score the same tokens, without a run."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from gspo.model.packing import TrainSequence, pack
from gspo.model.policy import load_policy
from gspo_protocol.messages import Probe
from gspo_protocol.probes import probe_tokens
from gspo_services.learner.engine import FrozenModel, probe_batch
from gspo_services.learner.first_look import FirstLook, OtherPolicyError
from gspo_services.learner.weights import DTYPES
from gspo_services.rollout.__main__ import server_options
from gspo_services.rollout.sglang import Engine, EngineError, EngineServer, GenerateRequest, SamplingParameters, ServerError
from gspo_services.rollout.weights import require_same_policy
from gspo_services.shared.runtime.errors import EXIT_FAILED, ConfigurationError, ServiceError
from gspo_services.shared.runtime.plain_text import indented_lines
from gspo_services.shared.settings import Settings, model_config

PROMPT: Final = 16
SAMPLED: Final = 64


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """What the server sampled behind the first tokens of the probe."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


def check_probe(settings: Settings) -> int:
    """Compare, and say what differs. Returns the exit status.

    Raises: ConfigurationError for a model that cannot be loaded, or a server that is refused; ServiceError when it fails.
    """
    model, device = settings.model, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(model.path)
    vocabulary = int(config["vocab_size"])
    packed = probe_batch(max(2, settings.longest_sequence - 1), vocabulary)
    try:
        frozen = FrozenModel(
            load_policy(model.path, DTYPES[settings.learner.dtype]), device,
            logprob_chunk_tokens=settings.learner.logprob_chunk_tokens, float32_head=model.float32_head,
            fused_head=settings.learner.fused_head,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigurationError(f"the model in {model.path} cannot be trained: {error}") from error
    own = frozen.logprobs(packed.to(device)).cpu()[packed.mask_T].tolist()
    frozen.move(torch.device("cpu"))
    gc.collect()
    torch.cuda.empty_cache()
    probe = Probe(packed.num_tokens, vocabulary, own, settings.learner.dtype, json.dumps(config))
    try:
        sampled = asyncio.run(_ask(settings, probe))
        frozen.move(device)
        _require_sampled(settings, frozen, device, sampled, vocabulary)
    except (OtherPolicyError, ConfigurationError) as error:
        sys.stdout.write(indented_lines(f"fail  {error}") + "\n")
        return EXIT_FAILED
    except (EngineError, ServerError) as error:
        raise ServiceError(str(error)) from error
    said = f"ok    server and learner agree about {probe.num_tokens} tokens, and about {len(sampled.token_ids)} sampled ones"
    sys.stdout.write(said + "\n")
    return 0


async def _ask(settings: Settings, probe: Probe) -> SampledTokens:
    """Raises: ConfigurationError that says what differs; EngineError, ServerError."""
    url = settings.rollout.server_url
    if url:
        return await _ask_at(url, settings, probe)
    with tempfile.TemporaryDirectory(prefix="gspo-probe-") as folder:
        options = replace(server_options(settings, "probe"), log_path=Path(folder) / "server.log")
        async with EngineServer(options) as server:
            return await _ask_at(server.url, settings, probe)


async def _ask_at(url: str, settings: Settings, probe: Probe) -> SampledTokens:
    async with Engine(url, vocab_size=probe.vocabulary) as engine:
        try:
            (await engine.server_info()).require_learners_policy()
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        version = await engine.weight_version()
        try:
            await require_same_policy(engine, probe)
        except ConfigurationError as error:
            loaded = f"; it has version {version} of a run, not model.path: start it again to compare" if version else ""
            raise ConfigurationError(f"{error}{loaded}") from error
        sampling = SamplingParameters(
            max_new_tokens=min(SAMPLED, settings.longest_sequence - PROMPT), temperature=settings.sampling.temperature,
            ignore_eos=True,
        )  # fmt: skip
        prompt = probe_tokens(PROMPT, probe.vocabulary)
        request = GenerateRequest(rid="probe", input_ids=prompt, sampling=sampling)
        pieces = [piece async for piece in engine.generate(request)]
    return SampledTokens(
        token_ids=np.concatenate([piece.token_ids for piece in pieces]).tolist(),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]).tolist(),
    )


def _require_sampled(
    settings: Settings, frozen: FrozenModel, device: torch.device, sampled: SampledTokens, vocabulary: int
) -> None:
    """Raises: OtherPolicyError."""
    token_ids = np.concatenate([probe_tokens(PROMPT, vocabulary), np.asarray(sampled.token_ids, dtype=np.int64)])
    actions = np.arange(len(token_ids)) >= PROMPT
    behaviour = np.zeros(len(token_ids), dtype=np.float32)
    behaviour[actions] = sampled.logprobs
    sequence = TrainSequence(
        token_ids=token_ids, action_mask=actions, behaviour_logprobs=behaviour, versions=np.where(actions, 0, -1),
        turn_ids=np.where(actions, 0, -1).astype(np.int32), temperature=settings.sampling.temperature,
        advantages=np.zeros(len(token_ids), dtype=np.float32),
    )  # fmt: skip
    packed = pack([sequence], policy_version=0).to(device)
    look = FirstLook.of(settings, device.type)
    look.require(look.sums(packed, frozen.logprobs(packed), 0))
