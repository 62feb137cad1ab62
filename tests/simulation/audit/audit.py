"""What must always hold, checked where it happens: at every commit, every message a broker sends, every batch trained.

The audit trusts no process. It keeps its own copy of what was committed, what engines really generated and with which
weights, and what was trained, and compares. Each broker has books of its own; here is what concerns them all.
"""

from collections import Counter
from collections.abc import Callable

from gspo_protocol.digests import tensor_digest
from gspo_services.rollout.sglang.generation import GenerateRequest, OutputPiece
from tests.simulation.audit.agents import Generation
from tests.simulation.audit.books import Rules, Shared, Violation
from tests.simulation.audit.broker import BrokerAudit
from tests.simulation.brokers.whole import WholeAudit
from tests.simulation.loop import Process


class Audit(WholeAudit):
    """The audit of a run, and what its engines really do."""

    def __init__(self, rules: Rules, happened: Counter[str], report: Callable[[Violation], None]) -> None:
        """``report`` is called with each violation."""
        shared = Shared(happened, report)
        super().__init__(rules, shared, tuple(BrokerAudit(rules, shared, number) for number in range(rules.num_brokers)))

    def version_of(self, version: int, content: bytes) -> int | None:
        """The published version that ``content`` is; None when no learner published it."""
        return version if self.shared.published.get(version) == content else None

    def loaded(self, session: str, version: int | None) -> None:
        if version is not None:
            self.shared.served[session].add(version)

    def replicates(self, session: str, version: int, content: bytes) -> None:
        """A rollout's replica has verified weights under a version number, for its engine and for peers."""
        self.require(
            self.shared.published.get(version) == content,
            "G5 a replica is what was published",
            lambda: f"{session} has {tensor_digest(content)[:12]} as version {version}, which was published otherwise",
        )

    def generates(self, request: GenerateRequest) -> Generation:
        """An engine is asked for tokens."""
        trajectory_id, epoch, _ = (int(part) for part in request.rid.split("-"))
        self.of(trajectory_id).asked_to_sample(trajectory_id, epoch, request)
        return Generation(trajectory_id, epoch, [int(token) for token in request.input_ids], of_agent=self.rules.agents)

    def generated(self, process: Process, generation: Generation, piece: OutputPiece) -> None:
        """An engine has made the next tokens."""
        trajectory_id = generation.trajectory_id
        books, served = self.of(trajectory_id), self.shared.served[process.session]
        made = books.made[trajectory_id]
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
            books.samples(process.session, generation)
            generation.go_on(token)
