"""The learner's probe of a model in files, as ``LearnerEngine.version_probe`` makes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gspo.model.policy import load_policy, prepare_policy
from gspo.model_files.configuration import read_config
from gspo_protocol.messages import Probe
from gspo_services.learner.engine.probing import probe_batch
from tests.support.policy.forward import logprobs_of

NUM_TOKENS = 400


def learners_probe(directory: Path, dtype: str = "float32") -> Probe:
    model: Any = load_policy(directory, getattr(torch, dtype))
    prepare_policy(model, logprob_chunk_tokens=16)
    config = read_config(directory)
    packed = probe_batch(NUM_TOKENS, config["vocab_size"])
    logprobs = logprobs_of(model, packed).logprobs_T[packed.mask_T].tolist()
    return Probe(NUM_TOKENS, config["vocab_size"], logprobs, dtype, json.dumps(config))  # type: ignore[arg-type]
