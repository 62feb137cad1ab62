"""How far a run is: its time, what is left, and what an empty one waits for."""

from pathlib import Path

import pytest

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.runs.reading import open_run
from gspo_services.runs.view.overview import Curves
from gspo_services.runs.view.progress import plain_progress, waits_for
from gspo_services.shared.settings import Settings, override_settings, write_run_settings
from tests.support.broker.ledger import LEARNER, LedgerHarness
from tests.support.processes.small_run import FIRST
from tests.support.runs.learning_lines import a_batch


def test_a_run_says_what_it_waits_for_until_a_batch_is_trained(tmp_path: Path) -> None:
    broker = LedgerHarness(path=tmp_path / LEDGER_FILE)
    overrides = [f"run.directory={tmp_path}", "run.num_batches=10", "batch.groups_per_batch=2", "batch.mini_batches=1"]
    write_run_settings(override_settings(Settings(), overrides))

    def said() -> str:
        with open_run(tmp_path) as opened:
            facts = opened.facts()
            assert plain_progress(opened, facts, Curves())["waits_for"] == (
                "" if facts.num_trained else waits_for(opened, facts)
            )
            return "" if facts.num_trained else waits_for(opened, facts)

    assert "waits for the learner" in said()
    broker.hello(FIRST)
    broker.hello(LEARNER, "learner")
    broker.publish(1, 0)
    assert "waits for a rollout" in said()
    leases = broker.lease(FIRST, 3)
    for lease in leases[:2]:
        broker.episode(FIRST, lease, 1)
    assert said() == "It generates: 1 of the 2 of its first batch groups are complete, 1 under way."
    broker.episode(FIRST, leases[2], 1)
    for lease in broker.lease(FIRST, 1):
        broker.episode(FIRST, lease, 1)
    broker.request_batch(0, 1)
    assert said() == "The learner trains the first batch."
    broker.publish(2, 1)
    broker.trained(0, 2)
    assert said() == ""
    broker.store.close()


def test_an_empty_run_that_has_ended_says_who_knows_why(tmp_path: Path) -> None:
    LedgerHarness(path=tmp_path / LEDGER_FILE).store.close()
    with open_run(tmp_path) as opened:
        assert f"`gspo doctor {tmp_path}` says what is wrong" in waits_for(opened, opened.facts())


@pytest.mark.parametrize(("wanted", "left_s"), [(10, 10 * 4.0), (0, None)])
def test_what_is_left_follows_the_median_batch(tmp_path: Path, wanted: int, left_s: float | None) -> None:
    broker = LedgerHarness(path=tmp_path / LEDGER_FILE)
    if wanted:
        write_run_settings(override_settings(Settings(), [f"run.directory={tmp_path}", f"run.num_batches={wanted}"]))
    curves = Curves()
    times = [0.0, 4.0, 8.0, 1000.0, 1004.0]  # It stood still once.
    curves.take([{**a_batch(at, time=50 + time, time_s=time), "line": at + 1} for at, time in enumerate(times)])
    with open_run(tmp_path) as opened:
        found = plain_progress(opened, opened.facts(), curves)
        assert (found["took_s"], found["last_time"], found["left_s"]) == (1004.0, 1054.0, left_s)
        assert plain_progress(opened, opened.facts(), Curves())["left_s"] is None
    broker.store.close()
