"""What tests of whole broker processes read of a run."""

from gspo_services.broker.rows import TrajectoryRow
from gspo_services.broker.store.store import Store
from tests.support.broker.peers import logprobs_of, tokens_of
from tests.support.broker.process import BrokerProcess

RUN_TIMEOUT_S = 120.0


def rows_of_batches(broker: BrokerProcess, num_batches: int) -> list[list[TrajectoryRow]]:
    """Every batch on disk, its tokens checked against what the scripted rollouts generate."""
    found = []
    fingerprint = broker.last("broker_started")["fingerprint"]
    with Store(broker.run_directory / "ledger.sqlite3", fingerprint=fingerprint, run_id="") as store:
        for index in range(num_batches):
            _, items = store.batch(index)
            for row, payload in items:
                length = row.num_tokens
                assert payload.token_ids.tolist() == tokens_of(row.trajectory_id, length).tolist()
                assert payload.logprobs.tolist() == logprobs_of(row.trajectory_id, length).tolist()
            found.append([row for row, _ in items])
    return found
