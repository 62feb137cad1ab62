"""A small whole run in a directory, made without engines: a ledger, metrics.jsonl, settings and a checkpoint."""

import json
from pathlib import Path

from gspo_protocol.messages import Checkpointed, Journal, Resume
from gspo_services.broker.ledger.actions import GrantLease, SessionKey
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import BatchSection, Run, Settings
from tests.support.broker.ledger import CONFIG, LEARNER, LedgerHarness

FIRST, SECOND = SessionKey("rollout-0", "a"), SessionKey("rollout-1", "b")
NUM_BATCHES = 3


def write_small_run(directory: Path, *, reports_last: bool = True) -> None:
    """Three batches of two groups of two, with a failure and a restart.

    Group 0 fails and is dropped. An episode of group 1 continues under a second lease. The learner restarts after batch 1
    from its checkpoint of batch 0, gets batch 1 again and comes to other weights. ``reports_last``: the report of the last
    training arrives.
    """
    settings = Settings(
        model={"path": directory / "model"},  # type: ignore[arg-type] - it is not there, wherever the tests run
        run=Run(directory=directory, num_batches=NUM_BATCHES),
        batch=BatchSection(
            group_size=CONFIG.group_size,
            groups_per_batch=CONFIG.groups_per_batch,
            mini_batches=1,
            max_lag=CONFIG.max_lag,
        ),
    )
    directory.mkdir(parents=True)
    ledger = LedgerHarness(path=directory / LEDGER_FILE)
    write_run_settings(settings)
    _work(ledger, directory, reports_last=reports_last)
    MetricsFile(directory / METRICS_FILE).append(ledger.store.metrics_after(0))
    ledger.store.close()


def _work(broker: LedgerHarness, directory: Path, *, reports_last: bool) -> None:
    for sender in (FIRST, SECOND):
        broker.hello(sender)
    broker.hello(LEARNER, "learner")
    broker.publish(1, 0)
    _fail_a_group(broker)
    _resume_an_episode(broker)
    version = 1
    for index in range(NUM_BATCHES):
        _fill(broker, version)
        broker.request_batch(index, version)
        version += 1
        broker.publish(version, index + 1)
        if reports_last or index < NUM_BATCHES - 1:
            broker.trained(index, version)
        if index == 0:
            broker.send(LEARNER, Checkpointed(next_batch=1, policy_version=version))
            write_checkpoint(directory, version, 1)
        if index == 1:
            version = _restart_the_learner(broker, version)


def write_checkpoint(directory: Path, version: int, position: int) -> Path:
    """The metadata of a checkpoint, which is all that an audit reads of it."""
    path = directory / "checkpoints" / f"version-{version:010d}-batch-{position:010d}"
    path.mkdir(parents=True)
    content = {"format": 1, "state": {"policy_version": version, "batch_position": position, "mismatch": {}}}
    (path / "checkpoint.json").write_text(json.dumps(content))
    return path


def _fail_a_group(broker: LedgerHarness) -> None:
    """The first episode fails as often as it may. Its group is dropped, with the work of the others."""
    first, other = broker.lease(FIRST, 2)
    broker.grow(FIRST, other, 5, 1)
    broker.fail(FIRST, first)
    (again,) = broker.lease(FIRST, 1)
    assert again.trajectory_id == first.trajectory_id
    broker.fail(FIRST, again)


def _resume_an_episode(broker: LedgerHarness) -> None:
    (lease,) = broker.lease(FIRST, 1)
    broker.grow(FIRST, lease, 2, 1)
    for place in range(2):
        broker.send(FIRST, _entry(lease, place))
    broker.tick(CONFIG.lease_s + 1)
    (again,) = broker.lease(SECOND, 1)
    assert (again.trajectory_id, again.epoch) == (lease.trajectory_id, lease.epoch + 1)
    broker.episode(SECOND, again, 1, reward=0.0)


def _entry(lease: GrantLease, place: int) -> Journal:
    entry = {"step": "search", "result": place}
    return Journal(trajectory_id=lease.trajectory_id, epoch=lease.epoch, place=place, entry=entry)


def _fill(broker: LedgerHarness, version: int) -> None:
    """Finish every episode that can be leased; some have a journal."""
    while leases := broker.lease(FIRST, 4, version):
        for number, lease in enumerate(leases):
            if not number:
                broker.send(FIRST, _entry(lease, lease.num_entries))
            broker.episode(FIRST, lease, version, reward=float(number % 2), num_tokens=3 + number)


def _restart_the_learner(broker: LedgerHarness, version: int) -> int:
    """Resume from the checkpoint after one batch, train the second again and make other weights with a new number."""
    learner = SessionKey(LEARNER.peer, LEARNER.session)
    broker.send(learner, Resume(next_batch=1))
    broker.request_batch(1, 0)
    broker.publish(version + 1, 2)
    broker.trained(1, version + 1)
    return version + 1
