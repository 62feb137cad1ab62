"""Checkpoints of a small learner."""

from pathlib import Path

from gspo_services.learner.checkpoints.format import CheckpointState
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.saving import save_checkpoint


def state(batches: int) -> CheckpointState:
    return CheckpointState(policy_version=batches + 1, batch_position=batches, mismatch={})


def saved(root: Path, *positions: int, keep: int = 3) -> list[Path]:
    return [save_checkpoint(BigramEngine(seed=each), root, state(each), keep=keep) for each in positions]


def truncated(path: Path) -> None:
    file = path / "engine" / "table.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_a_flipped_bit(path: Path) -> None:
    file = path / "engine" / "table.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def without_a_file(path: Path) -> None:
    (path / "random-00000.json").unlink()


def without_metadata(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def with_other_metadata(path: Path) -> None:
    file = path / "checkpoint.json"
    file.write_text(file.read_text().replace('"batch_position": 4', '"batch_position": 5'))
