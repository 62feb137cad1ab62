"""What an engine must compute of a version, for ``gspo_protocol.messages.Probe``."""

from __future__ import annotations

import numpy as np

from gspo.model.packing import PackedBatch, TrainSequence, pack
from gspo_protocol.probes import probe_spans, probe_tokens


def probe_batch(num_tokens: int, vocabulary: int) -> PackedBatch:
    """The probe as one sequence, whose scored tokens are its action tokens: only they need logits."""
    actions = np.zeros(num_tokens, dtype=np.bool_)
    for first, last in probe_spans(num_tokens):
        actions[first:last] = True
    sequence = TrainSequence(
        token_ids=probe_tokens(num_tokens, vocabulary),
        action_mask=actions,
        behaviour_logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.where(actions, 0, -1),
        turn_ids=np.where(actions, 0, -1).astype(np.int32),
        temperature=1.0,
        advantages=np.zeros(num_tokens, dtype=np.float32),
    )
    return pack([sequence], policy_version=0)
