"""A run is copied while it goes on, restored, and trained to its end. ``make test-demo``."""

from pathlib import Path

import pytest

from gspo_services.runs.backup import back_up, restore
from tests.support.broker.ledger_audit import audit
from tests.support.runs.multi_turn import multi_turn_run

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1500)]
SETTINGS = ("run.num_batches=10", "broker.keep_batches=2", "learner.checkpoint_every_batches=2")


def test_a_run_that_was_copied_on_its_way_is_restored_and_ends(tmp_path: Path) -> None:
    said: list[str] = []
    with multi_turn_run(tmp_path / "run", *SETTINGS) as run:
        run.wait_until("fifth batch", lambda: len(run.rows("batch")) >= 5, 300)
        _, manifest = back_up(tmp_path / "run", tmp_path / "backups", said.append)
        assert run.wait_finished(900) == 0, run.tail()
    restored = tmp_path / "restored"
    restore(tmp_path / "backups", restored, None, said.append)
    begun = audit(restored)
    assert begun.problems == []
    assert begun.num_batches == manifest.num_batches < 10
    with multi_turn_run(restored, *SETTINGS) as again:
        assert again.wait_finished(900) == 0, again.tail()
    report = audit(restored)
    assert report.problems == []
    assert report.num_batches == 10
    assert report.dropped == {}
    # The original was not disturbed.
    assert audit(tmp_path / "run").problems == []
