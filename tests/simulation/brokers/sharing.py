"""Brokers that share a run keep to their shares, and have the same versions."""

from collections.abc import Sequence

from gspo_protocol.messages import AnyMessage, Batch, Chunk, Finish, Heartbeat, Journal, Lease, Message, Release, Welcome
from gspo_services.broker.rows import EvaluationRow, GroupRow, Row, TrajectoryRow, VersionRow
from tests.simulation.audit.books import Books

ONE_GIVER = "several brokers: no two brokers give one id"
OWN_TASKS = "several brokers: a task is sampled by its broker alone"
OWN_WORK = "several brokers: what concerns a trajectory goes to its broker"
KNOWN = "several brokers: a rollout has no version that its broker does not know"
FIRST_EVALUATES = "several brokers: broker 0 alone evaluates"
NO_VERSION = {-1, 0}
"""Of tokens that nobody sampled; and what an engine says that lies."""
ONE_CONTENT = "one version, one content"


class SharingAudit(Books):
    """Compares this broker with the others."""

    # --- on disk ----------------------------------------------------------------------------------------------------------

    def keeps_to_its_share(self, rows: Sequence[Row]) -> None:
        """A transaction with these rows is durable."""
        for row in rows:
            match row:
                case GroupRow():
                    self._gives("group", row.group_id)
                    if row.split == "train":
                        self._gives("prompt", row.prompt)
                        self._samples(row)
                    else:
                        self._evaluates()
                case TrajectoryRow():
                    self._gives("trajectory", row.trajectory_id)
                case EvaluationRow():
                    self._evaluates()
                case VersionRow():
                    self._knows(row)
                case _:
                    pass

    def _gives(self, what: str, number: int) -> None:
        giver = self.shared.given.setdefault((what, number), self.number)
        self.require(
            giver == self.number,
            ONE_GIVER,
            lambda: f"{what} {number} is of broker {self.number}, and was given by broker {giver}",
        )

    def _samples(self, group: GroupRow) -> None:
        sampler = self.shared.given.setdefault(("task", group.task_index), self.number)
        self.require(
            sampler == self.number,
            OWN_TASKS,
            lambda: f"task {group.task_index} is sampled by broker {self.number}, and was by broker {sampler}",
        )

    def _evaluates(self) -> None:
        self.require(self.number == 0, FIRST_EVALUATES, lambda: f"broker {self.number} evaluates")

    def _knows(self, row: VersionRow) -> None:
        version = row.policy_version
        known = self.shared.digests.setdefault(version, row.digest)
        self.require(
            known == row.digest,
            ONE_CONTENT,
            lambda: f"version {version} is {row.digest[:12]} at broker {self.number}, and {known[:12]} at another one",
        )

    # --- messages ---------------------------------------------------------------------------------------------------------

    def is_sent(self, peer: bytes, message: AnyMessage) -> None:
        """The broker has received a message of an honest peer."""
        match message:
            case Chunk() | Finish() | Release() | Journal():
                self._require_mine(peer, message.trajectory_id)
            case Heartbeat(leases=leases):
                for lease in leases:
                    self._require_mine(peer, lease.trajectory_id)
            case _:
                pass
        if isinstance(message, Chunk):
            versions = {run.version for run in message.version_runs} - NO_VERSION
            self.require(
                versions <= self.durable.versions.keys(),
                KNOWN,
                lambda: (
                    f"{peer.decode()} sends broker {self.number} tokens of versions {versions}, it knows "
                    f"{list(self.durable.versions)}"
                ),
            )

    def _require_mine(self, peer: bytes, trajectory_id: int) -> None:
        self.require(
            self.is_mine(trajectory_id),
            OWN_WORK,
            lambda: f"{peer.decode()} tells broker {self.number} of trajectory {trajectory_id}",
        )

    def others_see(self, peer: bytes, message: Message) -> None:
        """The broker sends a message: what only several brokers can meet is counted."""
        if self.rules.num_brokers == 1:
            return
        others_away = any(self.shared.is_away(other) for other in range(self.rules.num_brokers) if other != self.number)
        match message:
            case Batch():
                self.happened["share sent while another broker was away"] += others_away
            case Lease():
                self.happened["lease given while another broker was away"] += others_away
            case Welcome(policy_version=version) if self.sessions.get(peer, "").startswith("learner"):
                met = self.shared.met[self.sessions[peer]]
                self.happened["learner met brokers at different versions"] += bool(met) and version not in met
                met.add(version)
            case _:
                pass
