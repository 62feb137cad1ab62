"""Which errors mean that another rank is gone."""

from pathlib import Path

import pytest
import torch.distributed

from gspo_services.learner.checkpoints.format import CheckpointState
from gspo_services.learner.lost_rank import LostRankError, lost_ranks_named
from gspo_services.shared.runtime.errors import ServiceError
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.saving import save_checkpoint

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.\nmore"


@pytest.mark.parametrize("error", [RuntimeError(GLOO), torch.distributed.DistBackendError("NCCL error")])
def test_a_failed_collective_is_a_lost_rank(error: RuntimeError) -> None:
    with pytest.raises(LostRankError, match=r"rank 0 lost another rank in a collective .*resumes from its last checkpoint"):
        with lost_ranks_named():
            raise error


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ServiceError("of ours, on gloo"), ValueError(GLOO)])
def test_other_errors_are_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, lost_ranks_named():
        raise error
    assert caught.value is error


def test_a_rank_lost_while_saving_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    class Alone(BigramEngine):
        def save_state(self, directory: Path) -> list[Path]:
            raise RuntimeError(GLOO)

    with pytest.raises(RuntimeError) as caught:
        save_checkpoint(Alone(), tmp_path, CheckpointState(policy_version=1, batch_position=1, mismatch={}))
    assert str(caught.value) == GLOO
    assert list(tmp_path.iterdir()) == []
