"""Chooses which checkpoints stay despite newer ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def worth_keeping(checkpoints: Sequence[Path], scores: Mapping[int, float | None]) -> set[Path]:
    """Return the checkpoint whose weights did best on the held-out tasks, of equal ones the earliest, and those whose
    evaluation is still under way.

    Args:
        checkpoints: those of fewer batches first.
        scores: the mean reward by policy version; None: not known yet. Version 0 stands for weights without a version.
    """
    versions = {path: _version(path) for path in checkpoints}
    pending = {path for path, version in versions.items() if version and version in scores and scores[version] is None}
    best: tuple[float, Path] | None = None
    for path, version in versions.items():
        score = scores.get(version) if version else None
        if score is not None and (best is None or score > best[0]):
            best = (score, path)
    return pending if best is None else {best[1], *pending}


def _version(checkpoint: Path) -> int:
    """Return the policy version in a checkpoint's name (``format.checkpoint_of``)."""
    return int(checkpoint.name.split("-")[1])
