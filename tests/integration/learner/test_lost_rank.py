"""A rank when its peer dies in the middle of training."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.support.learner.lost_rank_worker import STATUS
from tests.support.learner.training_groups import write_model_and_groups
from tests.support.learner.two_ranks import PATIENCE_S, two_ranks


def test_a_rank_whose_peer_is_killed_ends_at_once_and_says_why(tmp_path: Path) -> None:
    write_model_and_groups(tmp_path)
    with two_ranks(tmp_path, 1800) as (first, second):
        second.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        output, _ = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == STATUS, output
        assert time.monotonic() - begin < PATIENCE_S
        assert "rank 0 lost another rank in a collective (" in output
        assert "it resumes from its last checkpoint" in output
