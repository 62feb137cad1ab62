"""What an engine gives out, without an engine."""

from collections.abc import Sequence

import numpy as np

from gspo_protocol.messages import VersionRun
from gspo_services.rollout.sglang.generation import OutputPiece


def a_piece(token_ids: Sequence[int], logprobs: Sequence[float], *runs: tuple[int, int]) -> OutputPiece:
    """``runs``: versions, and how many tokens each has made."""
    return OutputPiece(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        version_runs=[VersionRun(version, num_tokens) for version, num_tokens in runs],
    )
