"""One of two ranks that train until the other is gone.

``python -m tests.support.learner.lost_rank_worker WORK TIMEOUT_S``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.lost_rank import LostRankError, lost_ranks_named
from tests.support.learner.learner_worker import OBJECTIVE, settings
from tests.support.learner.trained import train
from tests.support.loss.sequences import load_groups

STATUS = 17


def main(work: Path, timeout_s: float) -> int:
    torch.set_num_threads(1)
    try:
        with lost_ranks_named():
            waiting = settings(zero_stage=3, expert_parallel=2, collective_timeout_s=timeout_s)
            engine = LearnerEngine.create(work / "model", waiting)
            cpu = torch.device("cpu")
            timeouts = {group._get_backend(cpu).options._timeout for group in distributed_c10d._world.pg_map}
            assert timeouts == {timedelta(seconds=timeout_s)}, timeouts
            groups = load_groups(work / "groups.npz")
            while True:
                train(engine, groups, OBJECTIVE, policy_version=1, num_mini_batches=2)
                print("trained", flush=True)
    except LostRankError as error:
        print(error, flush=True)
        return STATUS


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
