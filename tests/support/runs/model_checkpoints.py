"""Checkpoints of a model in memory, in the learner's own format, without ranks and DeepSpeed."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gspo.model.serving import serving_weights
from gspo.moe.expert_layout import pieces
from protocol.digests import tensor_digest
from services.learner.checkpoints.digests import write_digests
from services.learner.checkpoints.format import ENGINE, CheckpointState, checkpoint_of, write_metadata
from services.learner.checkpoints.state_copy import state_digest
from services.learner.checkpoints.state_files import write_steps, write_tensors


def write_model_checkpoint(directory: Path, model: Any, version: int, position: int, *, dtype: str = "float32") -> Path:
    """Write a checkpoint of ``model`` (float32) into the run in ``directory``, as a learner of type ``dtype`` would."""
    path = directory / "checkpoints" / checkpoint_of(version, position)
    engine = path / ENGINE
    engine.mkdir(parents=True)
    written = [write_steps(engine, position)]
    for name, value in model.named_parameters():
        tensors = {}
        for piece in pieces(name, value.shape):
            part = piece.of(value.detach())
            tensors |= {
                f"{piece.name}/weight": part,
                f"{piece.name}/exp_avg": 0 * part,
                f"{piece.name}/exp_avg_sq": 0 * part,
            }
        written.append(write_tensors(engine, name, tensors))
    write_digests(path, 0, written)
    learner_dtype = getattr(torch, dtype)
    found = []
    for name, tensor in serving_weights(model, gathered=nullcontext, dtype=learner_dtype):
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        found.append((name, str(tensor.dtype), tuple(tensor.shape), tensor_digest(data)))
    state = CheckpointState(policy_version=version, batch_position=position, mismatch={})
    layout = {"model": type(model).__name__, "parameters": "", "dtype": dtype, "optimizer": "AdamW"}
    write_metadata(path, state, layout, state_digest(found).hex())
    return path
