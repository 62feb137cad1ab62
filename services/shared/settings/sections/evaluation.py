"""The section [evaluation]: held-out problems, in one set or in several named ones."""

import re
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from gspo_services.shared.eval_metrics import MAX_SAMPLES, require_samples
from gspo_services.shared.settings.sections.section import Section

ONLY_SET: Final = "held-out"
"""The set's name if the configuration names none."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")
_TAKEN: Final = ("length", "reward", "reward_error")
"""Words that already follow eval/ in metrics.jsonl."""


class EvaluationSet(Section):
    """A named set of problems: its tasks, samples of each, sampling and metrics."""

    environment: str = ""
    """environment.name of its tasks. Empty: the run's own."""
    options: dict[str, Any] = Field({})
    """environment.options of its tasks. For the run's own environment, options that are not named here stay the same."""
    every_batches: int | None = Field(None, ge=0)
    """How often a run evaluates it. Not set: evaluation.every_batches. 0: only `gspo eval` does."""
    split: Literal["eval", "train"] = "eval"
    """The split of the environment's tasks."""
    num_tasks: int | None = Field(None, ge=1)
    """The number of tasks, from the first on. Not set: all, or evaluation.num_tasks of an endless environment."""
    samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Samples of each task: k of avg@k, and the largest k of pass@k and maj@k."""
    metrics: list[str] = Field([])
    """The metrics: reward, avg@k, pass@k, maj@k, elo. Empty: reward, and those with k = samples that the set has."""
    solved_at: float = 1.0
    """A sample with at least this reward is solved."""
    temperature: float | None = Field(None, ge=0, le=10)
    """Not set: sampling.temperature. 0 takes the likeliest token."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Not set: sampling.top_p."""
    top_k: int | None = Field(None, ge=-1)
    """Not set: sampling.top_k. -1: all tokens."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Not set: sampling.max_turn_tokens."""
    max_tokens: int | None = Field(None, ge=2)
    """Not set: sampling.max_tokens."""

    @property
    def has_own_sampling(self) -> bool:
        """Whether any key of its sampling is set; then schedules do not change the set's sampling."""
        own = (self.temperature, self.top_p, self.top_k, self.max_turn_tokens, self.max_tokens)
        return any(value is not None for value in own)


class Evaluation(Section):
    """Held-out problems, never trained on: one set, sampled as in training, or several in ``[evaluation.sets.NAME]``."""

    every_batches: int = Field(5, ge=0)
    """Evaluate the newest version once every this many batches, and at the start and end. 0: never."""
    num_tasks: int = Field(64, ge=1)
    """Held-out tasks per evaluation, the same each time."""
    sets: dict[str, EvaluationSet] = Field({})
    """Named sets, instead of the run's own held-out tasks; `gspo eval` scores them, too. Their keys are below."""
    best_by: str = ""
    """SET/METRIC, such as "aime/avg@32": its highest value marks the best checkpoint (learner.keep_best_checkpoint), and the
    set's mean reward is the run's held-out reward. Empty: the reward of the first set."""
    max_share: float = Field(0.25, gt=0, le=1)
    """The share of leases that evaluations may have while training can use them. They also get what training leaves over."""

    @model_validator(mode="after")
    def _sets_can_be_measured(self) -> "Evaluation":
        for name, each in self.sets.items():
            if _NAME.fullmatch(name) is None or name in _TAKEN:
                raise ValueError(
                    f"evaluation.sets.{name[:64]}: a set's name has 1 to 32 of a-z, 0-9, '_', '-' and '.', begins with a "
                    f"letter or a digit, and is not one of {', '.join(_TAKEN)}"
                )
            try:
                require_samples(each.metrics, each.samples)
            except ValueError as error:
                raise ValueError(f"evaluation.sets.{name}.metrics: {error}") from error
            if each.top_k == 0:
                raise ValueError(f"evaluation.sets.{name}.top_k is 0: no token could be sampled; use -1 for all")
        self._require_best()
        return self

    def _require_best(self) -> None:
        name, _, metric = self.best_by.partition("/")
        if not self.best_by:
            return
        if name not in self.in_runs():
            raise ValueError(
                f"evaluation.best_by is {self.best_by[:100]!r}: expected SET/METRIC, with one of the sets that the run "
                f"evaluates: {', '.join(self.in_runs()) or 'there is none'}"
            )
        known = ["reward", *(each for each in self.sets[name].metrics if not each.startswith("maj@"))]
        if metric not in known:
            raise ValueError(
                f"evaluation.best_by is {self.best_by[:100]!r}: set {name} does not measure {metric[:64]!r} in a run but "
                f"{', '.join(known)}: name one, or add it to evaluation.sets.{name}.metrics"
            )

    def interval(self, chosen: EvaluationSet) -> int:
        """Return how often a run evaluates a set, in batches; 0: never."""
        return self.every_batches if chosen.every_batches is None else chosen.every_batches

    def in_runs(self) -> dict[str, EvaluationSet]:
        """Return the named sets that a run evaluates."""
        return {name: each for name, each in self.sets.items() if self.interval(each)}
