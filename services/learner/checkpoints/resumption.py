"""Resuming from the newest checkpoint that is whole. One that is damaged is set aside, and the next older one is taken.

Nothing is lost: the ledger has every token, and the batches since the older checkpoint are trained again. If no
checkpoint is left, training begins again with the starting model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import torch

from gspo.files import replace_file
from gspo_protocol.messages import Welcome
from gspo_services.learner.checkpoints.format import (
    LATEST,
    CheckpointEngine,
    CheckpointError,
    CheckpointState,
    DamagedCheckpoint,
    checkpoint_of,
    checkpoints_newest_first,
    load_checkpoint,
    pointer_problem,
)
from gspo_services.learner.checkpoints.versions import read_note

log = structlog.get_logger()

DAMAGED: Final = "damaged-"
_NONE: Final = -1


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A checkpoint that was loaded."""

    path: Path
    state: CheckpointState


def resume(engine: CheckpointEngine, root: Path) -> Resumed | None:
    """Load the newest intact checkpoint; None when there is none. Collective.

    Raises: CheckpointError, on all ranks alike, when an intact one cannot be used: it has another model or format.
    """
    if engine.rank == 0 and (problem := pointer_problem(root)):
        log.error("checkpoint_pointer_damaged", error=f"{problem}; the newest existing checkpoint is used")
    num_damaged = 0
    while (path := _newest(engine, root)) is not None:
        try:
            state = load_checkpoint(engine, path)
        except DamagedCheckpoint as error:
            num_damaged += 1
            _set_aside(engine, path, error)
            continue
        if num_damaged and engine.rank == 0:
            replace_file(root / LATEST, path.name + "\n")
        return Resumed(path=path, state=state)
    if num_damaged and engine.rank == 0:
        (root / LATEST).unlink(missing_ok=True)
        log.error(
            "no_checkpoint_left", error=f"{root} has no intact checkpoint: all batches are trained again from the ledger"
        )
    return None


def require_own_directory(root: Path, welcome: Welcome) -> None:
    """Raises: CheckpointError when a checkpoint was saved but ``root`` is empty: it is not the run's directory."""
    if welcome.next_batch == 0 or read_note(root) is not None or any(root.glob("*version-*")):
        return
    raise CheckpointError(
        f"{root} holds nothing of this run, although a checkpoint of {welcome.next_batch} batches was saved: is it mounted, "
        "and is run.directory right? To train all batches again from the ledger and the starting model, write "
        f"{welcome.policy_version} into {root}/last-version"
    )


def _newest(engine: CheckpointEngine, root: Path) -> Path | None:
    """Find the newest checkpoint, as rank 0 sees it. Collective."""
    version, batch = _NONE, _NONE
    if engine.rank == 0:
        found = checkpoints_newest_first(root)
        version, batch = (_NONE, _NONE) if not found else (int(part) for part in found[0].name.split("-")[1::2])
    if engine.world_size > 1:
        version, batch = engine.broadcast(torch.tensor([version, batch], dtype=torch.int64)).tolist()
    return None if batch == _NONE else root / checkpoint_of(version, batch)


def _set_aside(engine: CheckpointEngine, path: Path, error: DamagedCheckpoint) -> None:
    """Keep a damaged checkpoint as evidence, under a name that nothing reads. Collective."""
    failure: OSError | None = None
    if engine.rank == 0:
        kept = path.with_name(DAMAGED + path.name)
        number = 1
        while kept.exists():
            number += 1
            kept = path.with_name(f"{DAMAGED}{path.name}-{number}")
        log.error(
            "checkpoint_damaged",
            error=f"{error}; it is kept as {kept.name}, and the next older checkpoint is used. No token is lost: the "
            "batches after that one are trained again from the ledger",
        )
        try:
            path.rename(kept)
        except OSError as raised:
            failure = raised
    failed = torch.tensor([float(failure is not None)])
    if bool(engine.sum_over_ranks(failed).item()):
        raise CheckpointError(f"{path} is damaged, and cannot be renamed: {failure}; move it away") from failure
