"""Checkpoints: their format, how they are written during training, and how they are verified."""

from gspo_services.learner.checkpoints.base_model import BaseDigest
from gspo_services.learner.checkpoints.canary import canary_batch, require_canary, write_canary
from gspo_services.learner.checkpoints.digest_stream import streamed_digest
from gspo_services.learner.checkpoints.digests import FileDigest, find_damage
from gspo_services.learner.checkpoints.format import CheckpointError, CheckpointState, DamagedCheckpoint, read_metadata
from gspo_services.learner.checkpoints.resumption import require_own_directory, resume
from gspo_services.learner.checkpoints.saver import Background, CheckpointSaver, Threads
from gspo_services.learner.checkpoints.scrub import CheckpointScrub
from gspo_services.learner.checkpoints.state_copy import EngineCopy, state_digest
from gspo_services.learner.checkpoints.state_files import TensorDirectory, TensorFile, read_steps, write_steps
from gspo_services.learner.checkpoints.versions import Versions, known_commit

__all__ = [
    "Background",
    "BaseDigest",
    "CheckpointError",
    "CheckpointSaver",
    "CheckpointScrub",
    "CheckpointState",
    "DamagedCheckpoint",
    "EngineCopy",
    "FileDigest",
    "TensorDirectory",
    "TensorFile",
    "Threads",
    "Versions",
    "canary_batch",
    "find_damage",
    "known_commit",
    "read_metadata",
    "read_steps",
    "require_canary",
    "require_own_directory",
    "resume",
    "state_digest",
    "streamed_digest",
    "write_canary",
    "write_steps",
]
