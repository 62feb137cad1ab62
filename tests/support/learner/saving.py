"""Saves a checkpoint at once."""

from pathlib import Path

from gspo_services.learner.checkpoints.format import CheckpointEngine, CheckpointState
from gspo_services.learner.checkpoints.saver import CheckpointSaver


def save_checkpoint(engine: CheckpointEngine, root: Path, state: CheckpointState, *, keep: int = 3) -> Path:
    """Write a checkpoint below ``root``, make it the latest and remove all but the newest ``keep``. Collective."""
    saver = CheckpointSaver(engine, root, keep=keep, background=None)
    saver.begin(state)
    path = saver.advance()
    assert path is not None, "nothing was left for later"
    return path
