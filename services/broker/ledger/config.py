"""The run's rules and scheduled values, as the ledger gets them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gspo.tasks.ladders import Ladder
from gspo_protocol.messages import GroupSampling, TrainingValues
from gspo_services.broker.ledger.evaluations import SetTerms
from gspo_services.broker.ledger.sampling import SamplingRules, SourceShare
from gspo_services.broker.quotas import MIN_PATIENCE_S


class Schedules(Protocol):
    """The values that change within a run, by batch."""

    def sampling_at(self, batch: int) -> GroupSampling:
        """How a group is sampled that begins for ``batch``."""
        ...

    def training_at(self, batch: int) -> TrainingValues:
        """What ``batch`` is trained with, as far as it is scheduled."""
        ...


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """The run's rules, as far as the ledger needs them; see gspo_services.shared.settings.sections for what each means."""

    run_id: str
    fingerprint: str
    seed: int
    num_batches: int
    group_size: int
    groups_per_batch: int
    max_lag: int
    schedules: Schedules
    adapter_of: Callable[[str, int], str] = lambda source, task_index: ""
    """The adapter of a task, by its source ("train", "eval", "eval/SET") and index; empty without several."""
    grades_groups: bool = False
    """Whether a group of training is complete only when its answers were compared (``reward.group``)."""
    lease_s: float
    idle_lease_s: float
    max_attempts: int
    failure_budget: int
    stop_without_signal_batches: int = 0
    """0: never."""
    evaluate_every_batches: int
    num_eval_tasks: int
    """Held-out tasks per evaluation: at most as many as there are."""
    evaluation_sets: tuple[SetTerms, ...] = ()
    """Named sets, in place of the run's own held-out tasks."""
    evaluation_share: float = 1.0
    """The share of leases that evaluations may have while training needs the others."""
    num_train_tasks: int | None
    """None: endless."""
    min_patience_s: float = MIN_PATIENCE_S
    """A lease without tokens for less than this counts as on time."""
    sampling: SamplingRules = field(default_factory=SamplingRules)
    sources: tuple[SourceShare, ...] = ()
    """The sources of the training tasks; none: one, of ``num_train_tasks``."""
    ladders: tuple[Ladder, ...] = ()
    """The ladders of the training tasks, which then have no end."""
    begun_on: str = ""
    """Today, for a run that begins now; empty: a run has no day."""
    data_digest: str = ""
    """Digest of the training tasks' identities; empty without identities."""
