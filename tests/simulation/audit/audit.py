"""What must always hold, checked where it happens: at every commit, every message a broker sends, every batch trained.

The audit trusts no process. It keeps its own copy of what was committed, what engines really generated and with which
weights, and what was trained, and compares.
"""

from collections.abc import Mapping, Sequence

from gspo.model.packing import BatchGroup
from gspo_protocol.codec import Array
from gspo_protocol.digests import tensor_digest
from gspo_protocol.messages import Batch
from gspo_services.broker.sending import TokenSpan
from gspo_services.rollout.sglang.generation import GenerateRequest, OutputPiece
from tests.simulation.audit.agents import Generation
from tests.simulation.audit.disk import DiskAudit
from tests.simulation.audit.lines import LinesAudit
from tests.simulation.audit.messages import MessageAudit
from tests.simulation.audit.training import TrainingAudit
from tests.simulation.loop import Process


class Audit(DiskAudit, MessageAudit, TrainingAudit, LinesAudit):
    """The audit of a run, and what its engines really do."""

    @property
    def is_stopped(self) -> bool:
        """Whether the broker was asked to stop the run."""
        return bool(self.durable.run.stop_reason)

    # --- engines ----------------------------------------------------------------------------------------------------------

    def version_of(self, version: int, content: bytes) -> int | None:
        """The published version that ``content`` is; None when no learner published it."""
        return version if self.published.get(version) == content else None

    def loaded(self, session: str, version: int | None) -> None:
        if version is not None:
            self.served[session].add(version)

    def replicates(self, session: str, version: int, content: bytes) -> None:
        """A rollout's replica has verified weights under a version number, for its engine and for peers."""
        self.require(
            self.published.get(version) == content,
            "G5 a replica is what was published",
            lambda: f"{session} has {tensor_digest(content)[:12]} as version {version}, which was published otherwise",
        )

    def generates(self, request: GenerateRequest) -> Generation:
        """An engine is asked for tokens."""
        trajectory_id, epoch, _ = (int(part) for part in request.rid.split("-"))
        self.asked_to_sample(trajectory_id, epoch, request)
        return Generation(trajectory_id, epoch, [int(token) for token in request.input_ids], of_agent=self.rules.agents)

    def generated(self, process: Process, generation: Generation, piece: OutputPiece) -> None:
        """An engine has made the next tokens."""
        trajectory_id = generation.trajectory_id
        made, served = self.made[trajectory_id], self.served[process.session]
        versions = {run.version for run in piece.version_runs}
        self.require(
            versions <= served,
            "G5 only whole, published weights serve",
            lambda: (
                f"{process} generated trajectory {trajectory_id} with weights {versions}; its engine has loaded "
                f"{served} (0: weights that no learner published)"
            ),
        )
        for token, logprob in zip(piece.token_ids.tolist(), piece.logprobs.tolist(), strict=True):
            made[generation.context].add((token, logprob, generation.epoch))
            self.samples(process.session, generation)
            generation.go_on(token)

    # --- the learner ------------------------------------------------------------------------------------------------------

    def serves(self, version: int, content: bytes) -> None:
        """A learner is about to serve a version."""
        self.happened["the same weights under their number again"] += int(version in self.published)
        self.require(
            self.published.get(version, content) == content,
            "one version, one content",
            lambda: (
                f"version {version} is given to weights {tensor_digest(content)[:12]}, but was already given to "
                f"{tensor_digest(self.published[version])[:12]}"
            ),
        )
        self.published[version] = content

    def trains(
        self,
        history: Sequence[tuple[int, ...]],
        batch: Batch,
        arrays: Mapping[str, Array],
        spans: Sequence[TokenSpan],
        groups: Sequence[BatchGroup],
    ) -> None:
        super().trains(history, batch, arrays, spans, groups)
        self.expect_line(batch.index)

    def checkpoints(self, history: Sequence[tuple[int, ...]], next_batch: int) -> None:
        """A learner saves a checkpoint: its history is that of the committed batches, in order."""
        committed = [self.trained_for(index) for index in range(next_batch)]
        self.require(
            list(history) == committed,
            "G2 exactly once",
            lambda: f"a checkpoint after batch {next_batch - 1} has the history {history}, committed is {committed}",
        )

    def run_is_complete(self, history: Sequence[tuple[int, ...]]) -> None:
        """The run is over; its last checkpoint has this history."""
        if self.is_stopped:
            self.checkpoints(history, len(history))
            self.happened["run stopped"] += 1
            return
        self.checkpoints(history, self.rules.num_batches)
        self.is_complete()
