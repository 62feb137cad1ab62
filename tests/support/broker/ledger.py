"""A ledger with its store, driven by plain calls: the broker without sockets, threads or time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from gspo_protocol.codec import Array, decode, encode
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import (
    SEQUENCED,
    AnyMessage,
    BatchRequest,
    Chunk,
    Finish,
    GroupSampling,
    Heartbeat,
    Hello,
    LeaseRequest,
    Message,
    Published,
    Release,
    Role,
    Segment,
    Trained,
    TrainingValues,
    VersionRun,
)
from gspo_protocol.messages.experts import ModelExperts
from gspo_protocol.messages.gathered import Gathered, gather
from gspo_services.broker.ledger.actions import (
    Action,
    Announce,
    AppendChunk,
    AppendChunks,
    DeliverBatch,
    GrantLease,
    Reply,
    Reshelve,
    Save,
    SessionKey,
    WriteMetrics,
)
from gspo_services.broker.ledger.config import LedgerConfig
from gspo_services.broker.ledger.intake import TokenFacts
from gspo_services.broker.ledger.ledger import Ledger
from gspo_services.broker.store.payload import stored_chunk, stored_chunks
from gspo_services.broker.store.store import RowChanges, Store
from tests.support.broker.peers import VOCABULARY, logprobs_of, tokens_of

LEARNER = SessionKey("learner", "first")
SAMPLING = GroupSampling(temperature=1.0, max_turn_tokens=63, max_tokens=64, max_episode_tokens=64)


class ConstantSchedules:
    """Nothing changes within the run."""

    def sampling_at(self, batch: int) -> GroupSampling:
        return SAMPLING

    def training_at(self, batch: int) -> TrainingValues:
        return TrainingValues()


CONFIG = LedgerConfig(
    run_id="run",
    fingerprint="f",
    seed=1,
    num_batches=4,
    group_size=2,
    groups_per_batch=2,
    max_lag=1,
    schedules=ConstantSchedules(),
    lease_s=10.0,
    idle_lease_s=600.0,
    max_attempts=2,
    failure_budget=3,
    evaluate_every_batches=0,
    num_eval_tasks=0,
    num_train_tasks=None,
)


def config_with(**changes: Any) -> LedgerConfig:
    """The small run of these tests, with some rules changed."""
    return replace(CONFIG, **changes)


@dataclass
class LedgerHarness:
    """Hands events to a ledger and commits what it decides before returning the rest, as the broker's shell does."""

    config: LedgerConfig = CONFIG
    now: float = 100.0
    lines: list[dict[str, Any]] = field(default_factory=list)
    path: Path = Path(":memory:")

    def __post_init__(self) -> None:
        self.store = Store(self.path, fingerprint="f", run_id="run")
        # Most tests leave this to whoever collects the harness; from Python 3.13 on an unclosed connection is a warning.
        finalize(self, self.store.close)
        self._next_seq: dict[SessionKey, int] = {}
        self.restart()

    def restart(self) -> None:
        """The broker's process ends and begins again: only the rows are left."""
        self.ledger = self.restored()

    def restored(self) -> Ledger:
        """A second ledger from the same rows."""
        return Ledger(self.config, self.store.contents(), self.now)

    # --- events ---------------------------------------------------------------------------------------------------------

    def hello(self, sender: SessionKey, role: Role = "rollout") -> list[Action]:
        """A handshake; the sequence continues at the sender's next number."""
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            role=role,
            peer=sender.peer,
            session=sender.session,
            first_seq=self._next_seq.get(sender, 0),
        )
        return self._carry_out(self.ledger.on_hello(hello, self.now), {})

    def send(
        self, sender: SessionKey, message: AnyMessage, seq: int | None = None, experts: Array | None = None
    ) -> list[Action]:
        """A message of a session, with the scripted tokens if it is a chunk. A given ``seq`` sends one again.

        A rollout that asks for leases first reports that it serves.
        """
        if isinstance(message, LeaseRequest) and self.ledger.fleet.state(sender.peer) == "starting":
            self.send(sender, Heartbeat(policy_version=message.policy_version, status="serving", leases=[]))
        if seq is None and isinstance(message, SEQUENCED):
            seq = self._next_seq.get(sender, 0)
            self._next_seq[sender] = seq + 1
        arrays: dict[str, Any] = {}
        if isinstance(message, Chunk):
            arrays = _scripted(message) | ({} if experts is None else {"experts": experts})
        facts = TokenFacts.of(arrays) if arrays else None
        return self._carry_out(self.ledger.on_message(sender, message, seq, self.now, facts), arrays)

    def send_chunks(
        self, sender: SessionKey, chunks: Sequence[Chunk], seq: int | None = None, **changed: Any
    ) -> list[Action]:
        """Many chunks in one message, with the scripted tokens. ``changed``: arrays in place of these."""
        if seq is None:
            seq = self._next_seq.get(sender, 0)
            self._next_seq[sender] = seq + 1
        message, arrays = gather([(each, _scripted(each)) for each in chunks])
        received = decode(encode(message, {**arrays, **changed}, seq))
        facts = Gathered(received.arrays)
        return self._carry_out(self.ledger.on_message(sender, received.message, seq, self.now, facts), {})

    def tick(self, seconds: float = 0.0) -> list[Action]:
        """Time passes, and the ledger hears of it every second."""
        effects: list[Action] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            effects += self._carry_out(self.ledger.on_tick(self.now), {})
        return effects if seconds else self._carry_out(self.ledger.on_tick(self.now), {})

    def end(self) -> list[Action]:
        """The broker ends in order."""
        return self._carry_out(self.ledger.on_end(), {})

    def _carry_out(self, actions: list[Action], arrays: dict[str, np.ndarray]) -> list[Action]:
        changes = RowChanges()
        effects = []
        for action in actions:
            if isinstance(action, Reply | Announce):
                assert decode(encode(action.message)).message == action.message, "nobody could read it"
            match action:
                case Save(row=row):
                    changes.rows.append(row)
                case AppendChunk(chunk=chunk, peer=peer):
                    changes.chunks.append(
                        stored_chunk(chunk, arrays["token_ids"], arrays["logprobs"], peer, arrays.get("experts"))
                    )
                case AppendChunks(chunks=chunks, stretches=stretches, rows=rows, peer=peer):
                    changes.rows += rows
                    changes.chunks += stored_chunks(chunks, stretches, peer)
                case WriteMetrics(line=line):
                    changes.lines.append({**line, "time_s": self.now})
                    self.lines.append(line)
                case _:
                    effects.append(action)
        self.store.commit(changes)
        if any(isinstance(effect, Reshelve) for effect in effects):
            self.ledger.reshelve(self.store.contents())
        return effects

    # --- shorthands -----------------------------------------------------------------------------------------------------

    def publish(
        self, version: int, trained_batches: int, sender: SessionKey = LEARNER, experts: ModelExperts | None = None
    ) -> list[Action]:
        """The learner publishes."""
        message = Published(
            policy_version=version,
            endpoint="tcp://w:1",
            digest="d-2",
            num_bytes=1,
            trained_batches=trained_batches,
            vocabulary=VOCABULARY,
            experts=experts,
        )
        return self.send(sender, message)

    def lease(self, sender: SessionKey, capacity: int = 1, version: int = 1) -> list[GrantLease]:
        """What a rollout is granted."""
        request = LeaseRequest(request_id=0, capacity=capacity, policy_version=version)
        return granted(self.send(sender, request))

    def grow(
        self, sender: SessionKey, lease: GrantLease, num_tokens: int, version: int, offset: int | None = None
    ) -> list[Action]:
        """The holder sends ``num_tokens`` more action tokens."""
        row = self.ledger.state.groups.trajectory(lease.trajectory_id)
        start = offset if offset is not None else row.num_tokens if row is not None else 0
        return self.send(sender, chunk(lease, start, num_tokens, version))

    def finish(
        self,
        sender: SessionKey,
        lease: GrantLease,
        num_tokens: int,
        reward: float = 1.0,
        components: dict[str, float] | None = None,
        turn_roles: Sequence[int] = (),
    ) -> list[Action]:
        """The holder says that the episode is complete."""
        return self.send(
            sender,
            Finish(
                trajectory_id=lease.trajectory_id,
                epoch=lease.epoch,
                num_tokens=num_tokens,
                reason="done",
                turn_rewards=[reward],
                components=components or {},
                turn_roles=list(turn_roles),
            ),
        )

    def fail(self, sender: SessionKey, lease: GrantLease) -> list[Action]:
        """The holder gives up on the episode."""
        return self.send(
            sender, Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="reward timed out", failed=True)
        )

    def episode(self, sender: SessionKey, lease: GrantLease, version: int, reward: float = 1.0, num_tokens: int = 3) -> None:
        """A whole (rest of an) episode."""
        self.grow(sender, lease, num_tokens, version)
        row = self.ledger.state.groups.trajectory(lease.trajectory_id)
        assert row is not None
        self.finish(sender, lease, row.num_tokens, reward)

    def request_batch(self, index: int, version: int, sender: SessionKey = LEARNER) -> list[Action]:
        """The learner asks for a batch."""
        return self.send(sender, BatchRequest(index=index, policy_version=version))

    def trained(self, index: int, version: int, sender: SessionKey = LEARNER) -> list[Action]:
        """The learner has trained a batch."""
        return self.send(sender, Trained(index=index, policy_version=version, metrics={"loss": 0.25}))


def chunk(lease: GrantLease, offset: int, num_tokens: int, version: int) -> Chunk:
    """Action tokens of one version. A trajectory's first token is an observation."""
    parts = (
        [("observation", -1, 1), ("action", version, num_tokens - 1)] if offset == 0 else [("action", version, num_tokens)]
    )
    return Chunk(
        trajectory_id=lease.trajectory_id,
        epoch=lease.epoch,
        offset=offset,
        num_tokens=num_tokens,
        segments=[Segment(kind, 0, num) for kind, _, num in parts if num],  # type: ignore[arg-type]
        version_runs=[VersionRun(made_by, num) for _, made_by, num in parts if num],
        state={"at": offset + num_tokens},
    )


def _scripted(message: Chunk) -> dict[str, np.ndarray]:
    """The tokens of a chunk."""
    end = message.offset + message.num_tokens
    return {
        "token_ids": tokens_of(message.trajectory_id, end)[message.offset :],
        "logprobs": logprobs_of(message.trajectory_id, end)[message.offset :],
    }


def granted(actions: list[Action]) -> list[GrantLease]:
    """The leases among actions."""
    return [action for action in actions if isinstance(action, GrantLease)]


def delivered(actions: list[Action]) -> list[int]:
    """Indices of the batches among actions."""
    return [action.index for action in actions if isinstance(action, DeliverBatch)]


def replies(actions: list[Action], kind: type[Message]) -> list[Any]:
    """Messages of one type among actions."""
    return [action.message for action in actions if isinstance(action, Reply) and isinstance(action.message, kind)]
