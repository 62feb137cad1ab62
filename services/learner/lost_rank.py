"""Turns a collective that fails because a rank died or is missing into one clear error instead of C++ frames."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed

from gspo_services.shared.runtime.errors import ServiceError


class LostRankError(ServiceError):
    """Another rank is lost. This one cannot continue; all restart from the last checkpoint."""


def means_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because a rank is missing. torch turns gloo's errors into plain RuntimeErrors."""
    return isinstance(error, torch.distributed.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Inside the block a failed collective raises LostRankError."""
    try:
        yield
    except RuntimeError as error:
        if not means_lost_rank(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise LostRankError(
            f"rank {os.environ.get('RANK', '0')} lost another rank in a collective ({reason[:300]}): that rank's log says "
            "why; start the learner again, it resumes from its last checkpoint"
        ) from error
