"""Chooses the checkpoint of a run to export: the newest, the one after N batches, or the one that evaluated best."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gspo_services.runs.audit import Checkpoint
from gspo_services.runs.metrics import HeldOut, best_evaluation
from gspo_services.shared.runtime.errors import ConfigurationError

BEST: Final = "best"


@dataclass(frozen=True, kw_only=True)
class ChosenCheckpoint:
    """One checkpoint, and its result on the held-out tasks."""

    checkpoint: Checkpoint
    evaluation: HeldOut | None
    """None: these weights were not evaluated."""
    remark: str = ""
    """Something that the user should know about the choice."""


def wanted_checkpoint(text: str | None) -> int | str | None:
    """Parse a value of --checkpoint. Raises: ConfigurationError."""
    if text is None or text == BEST:
        return text
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text)
    raise ConfigurationError(f"--checkpoint is {text!r}: give a number of batches, such as 40, or {BEST!r}")


def choose(
    directory: Path, checkpoints: Sequence[Checkpoint], evaluations: Sequence[HeldOut], wanted: int | str | None
) -> ChosenCheckpoint:
    """Choose the checkpoint to export.

    Args:
        directory: the run's, for errors.
        checkpoints: the run's, oldest first.
        wanted: a number of trained batches; BEST; None for the newest.

    Raises: ConfigurationError when it does not exist, with those that do.
    """
    if not checkpoints:
        raise ConfigurationError(
            f"{directory} has no checkpoint yet: the learner saves one every learner.checkpoint_every_batches batches, and "
            "when it is stopped (`gspo stop`, Ctrl-C)"
        )
    if wanted == BEST:
        return _best(directory, checkpoints, evaluations)
    # A run that trained batches again may have two at one position: take the one with the newer weights.
    ordered = sorted(checkpoints, key=lambda each: (each.batch_position, each.policy_version))
    fitting = [each for each in ordered if wanted is None or each.batch_position == wanted]
    if not fitting:
        raise ConfigurationError(
            f"--checkpoint is {wanted}: {directory} has checkpoints after these batches: {_positions(ordered)}. "
            f"`gspo replay {directory} --batches {wanted}` trains the recorded batches up to there again"
        )
    return ChosenCheckpoint(checkpoint=fitting[-1], evaluation=evaluation_of(fitting[-1], evaluations))


def evaluation_of(checkpoint: Checkpoint, evaluations: Sequence[HeldOut]) -> HeldOut | None:
    """Return how a checkpoint's weights did. Each version means one set of weights; 0 stands for weights without one."""
    if not checkpoint.policy_version:
        return None
    fitting = (each for each in evaluations if each.policy_version == checkpoint.policy_version)
    return next((each for each in fitting if each.batch == checkpoint.batch_position), None)


def _best(directory: Path, checkpoints: Sequence[Checkpoint], evaluations: Sequence[HeldOut]) -> ChosenCheckpoint:
    """Choose the highest score (``evaluation.best_by``, or ``eval/reward``), and of equal ones the earliest: it is
    closest to the starting model."""
    judged = {found: each for each in checkpoints if (found := evaluation_of(each, evaluations)) is not None}
    evaluation, top = best_evaluation(judged), best_evaluation(evaluations)
    if evaluation is None or top is None:
        raise ConfigurationError(
            f"--checkpoint is {BEST}: none of the checkpoints in {directory} was evaluated; they are after these batches: "
            f"{_positions(checkpoints)}; evaluated were the weights after these: {_batches(evaluations)}. Give a number. "
            "Checkpoints are evaluated where learner.checkpoint_every_batches is a multiple of evaluation.every_batches"
        )
    remark = ""
    if top.score > evaluation.score:
        remark = (
            f"the best evaluation ({top.metric}) was {top.score:.4g}, after {top.batch} batches, but no checkpoint has "
            f"those weights: this is the best of {_positions(checkpoints)}"
        )
    return ChosenCheckpoint(checkpoint=judged[evaluation], evaluation=evaluation, remark=remark)


def _positions(checkpoints: Sequence[Checkpoint]) -> str:
    return ", ".join(str(position) for position in sorted({each.batch_position for each in checkpoints}))


def _batches(evaluations: Sequence[HeldOut]) -> str:
    return ", ".join(str(batch) for batch in sorted({each.batch for each in evaluations})[-20:]) or "none"
