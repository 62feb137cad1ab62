"""Tiny models of other families with the skill of ``models/tiny`` and its bad policy: a run has something to improve."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.tiny_models import build_tokenizer, imitate
from gspo_services.prepare.tiny_models.schools import EnvironmentSchool
from gspo_services.prepare.tiny_models.tokenizer import UNUSED_IDS
from gspo_services.tasks.environments import create_environment
from tests.support.policy.families import family_config, write_dropped

STEPS: Final = 600


def save_taught(directory: Path, kind: str, *, seed: int = 0, steps: int = STEPS) -> Any:
    """Write a checkpoint in float32 that was taught arithmetic by careless teachers, and its tokenizer; return the model."""
    tokenizer = build_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = {**family_config(kind), **ids, "vocab_size": len(tokenizer) + UNUSED_IDS}
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
        school = EnvironmentSchool(tokenizer, create_environment("arithmetic", {}))
        imitate(model, [school], random.Random(seed), steps, lambda _: None)
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_dropped(directory, kind)
    return model
