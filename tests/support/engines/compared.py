"""Log-probs of an engine beside those of the learner, over random sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from gspo_services.rollout.sglang.server_process import EngineServer
from tests.support.engines.prompt_logprobs import prompt_logprobs
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE
from tests.support.loss.sequences import random_sequence
from tests.support.policy.learner_logprobs import learner_logprobs_of

CLOSE: Final = 2e-5
PROMPTS: Final = 50


async def largest_difference(server: EngineServer, folder: Path) -> float:
    """Of log-probs of random sequences, |learner - engine|."""
    # SGLang misreports the last id of a vocabulary in a prompt.
    sequences = [random_sequence(4 + seed, seed, vocab_size=TINY_VOCAB_SIZE - 1) for seed in range(PROMPTS)]
    own = learner_logprobs_of(folder, sequences)
    served = [await prompt_logprobs(server.url, sequence.token_ids.tolist()) for sequence in sequences]
    return max(float(np.abs(here - there).max()) for here, there in zip(own, served, strict=True))
