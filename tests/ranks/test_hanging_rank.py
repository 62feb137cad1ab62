"""A rank when its peer hangs in the middle of training."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.learner.lost_rank_worker import STATUS
from tests.support.learner.training_groups import write_model_and_groups
from tests.support.learner.two_ranks import PATIENCE_S, two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]


def test_a_rank_whose_peer_hangs_ends_after_the_timeout(tmp_path: Path) -> None:
    write_model_and_groups(tmp_path)
    with two_ranks(tmp_path, 3) as (first, second):
        second.send_signal(signal.SIGSTOP)
        output, _ = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == STATUS, output
        assert "rank 0 lost another rank in a collective (" in output
