"""What a chunk costs between the broker's sockets and its disk, by how many chunks are in a message.

    python -m benchmarks.broker_intake.by_message --chunks 1 4 16 64 256

One thread, no sockets: encoded messages are decoded, decided by a real ledger, and committed by a real store, 256 chunks a
commit. CPU microseconds a chunk, by the clock of the thread's CPU. 1: each chunk in a message of its own.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from benchmarks.broker_intake.load import a_chunk, arrays_of
from gspo_protocol.codec import decode, encode
from gspo_protocol.limits import MAX_VOCABULARY
from gspo_protocol.messages import Published
from gspo_protocol.messages.gathered import gather
from gspo_services.broker.ledger import AppendChunk, AppendChunks, GrantLease, Save, SessionKey
from gspo_services.broker.sessions import token_facts
from gspo_services.broker.store import RowChanges, Store, stored_chunk, stored_chunks
from tests.support.broker.ledger import LEARNER, SAMPLING, ConstantSchedules, LedgerHarness, config_with

LEASES: Final = 256
SENDER: Final = SessionKey("rollout-0", "s")
STEPS: Final = ("decode", "decide", "rows", "store")


class LongEpisodes(ConstantSchedules):
    """Room for all the chunks."""

    def sampling_at(self, batch: int) -> Any:
        return replace(SAMPLING, max_turn_tokens=2**20, max_tokens=2**20, max_episode_tokens=2**20)


class Costs:
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def of(self, step: str, function: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        result = function()
        self.seconds[step] += time.thread_time() - begin  # type: ignore[assignment]
        return result


def measured(per_message: int, num_rounds: int, chunk_tokens: int, path: Path) -> Costs:
    """Take ``num_rounds`` rounds of one chunk for each of LEASES trajectories."""
    world = LedgerHarness(config_with(group_size=8, groups_per_batch=64, max_lag=1, schedules=LongEpisodes()))
    world.hello(LEARNER, "learner")
    published = Published(
        policy_version=1, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=MAX_VOCABULARY
    )
    world.send(LEARNER, published)
    world.hello(SENDER)
    leases = world.lease(SENDER, LEASES)
    costs, seq = Costs(), 0
    with Store(path, fingerprint="f", run_id="r") as store:
        for number in range(num_rounds):
            changes = RowChanges()
            for first in range(0, LEASES, per_message):
                frames = _frames(leases[first : first + per_message], number * chunk_tokens, chunk_tokens, seq)
                seq += 1
                received = costs.of("decode", lambda frames=frames: decode(frames))

                def decide(received: Any = received) -> Any:
                    return world.ledger.on_message(SENDER, received.message, received.seq, world.now, token_facts(received))

                actions = costs.of("decide", decide)
                costs.of("rows", lambda a=actions, r=received, c=changes: _add(a, r.arrays, c))
            costs.of("store", lambda changes=changes: store.commit(changes))
    return costs


def _frames(leases: list[GrantLease], offset: int, num_tokens: int, seq: int) -> list[bytes]:
    chunks = [a_chunk(lease.trajectory_id, lease.epoch, offset, num_tokens) for lease in leases]
    arrays = arrays_of(num_tokens)
    message, columns = (chunks[0], arrays) if len(chunks) == 1 else gather([(chunk, arrays) for chunk in chunks])
    return [bytes(frame) for frame in encode(message, columns, seq)]


def _add(actions: list[Any], arrays: Any, changes: RowChanges) -> None:
    """What the broker's shell does with the ledger's decisions."""
    for action in actions:
        match action:
            case Save(row=row):
                changes.rows.append(row)
            case AppendChunk(chunk=chunk, peer=peer):
                changes.chunks.append(stored_chunk(chunk, arrays["token_ids"], arrays["logprobs"], peer))
            case AppendChunks(chunks=chunks, stretches=stretches, rows=rows, peer=peer):
                changes.rows += rows
                changes.chunks += stored_chunks(chunks, stretches, peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="in a message")
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(f"| chunks a message | {' | '.join(STEPS)} | all |\n|---|{'---|' * len(STEPS)}---|", flush=True)
    for number in arguments.chunks:
        with tempfile.TemporaryDirectory(prefix="broker-by-message-") as directory:
            costs = measured(number, arguments.rounds, arguments.chunk_tokens, Path(directory) / "ledger.sqlite3")
        us = [1e6 * costs.seconds[step] / (LEASES * arguments.rounds) for step in STEPS]
        print(f"| {number} | {' | '.join(f'{each:.1f}' for each in us)} | {sum(us):.1f} |", flush=True)


if __name__ == "__main__":
    main()
