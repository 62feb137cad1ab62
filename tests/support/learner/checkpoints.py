"""What a folder of checkpoints holds."""

from pathlib import Path

from gspo_services.learner.checkpoints.format import METADATA, checkpoints_newest_first
from gspo_services.learner.checkpoints.versions import read_note


def find_latest(root: Path) -> Path | None:
    """The newest checkpoint with metadata; None when there is none."""
    return next((path for path in checkpoints_newest_first(root) if (path / METADATA).is_file()), None)


def newest_given(root: Path) -> int:
    """The highest number given; 0 when there is none. Raises: CheckpointError when the note is damaged."""
    note = read_note(root)
    return 0 if note is None else note.newest
