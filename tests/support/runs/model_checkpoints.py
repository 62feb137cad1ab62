"""Checkpoints of a model in memory, in the learner's own format, without ranks and DeepSpeed."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gspo.model.lora import LoraPlan, is_lora
from gspo.model.serving import lora_weights, serving_weights
from gspo.moe.expert_layout import pieces
from gspo_protocol.digests import bytes_digest
from gspo_services.learner.checkpoints.base_model import BaseDigest
from gspo_services.learner.checkpoints.digests import write_digests
from gspo_services.learner.checkpoints.format import ENGINE, CheckpointState, checkpoint_of, write_metadata
from gspo_services.learner.checkpoints.state_copy import state_digest
from gspo_services.learner.checkpoints.state_files import write_steps, write_tensors
from gspo_services.learner.engine.lora import lora_layout


def write_model_checkpoint(
    directory: Path,
    model: Any,
    version: int,
    position: int,
    *,
    dtype: str = "float32",
    plan: LoraPlan | None = None,
    names: Sequence[str] = (),
) -> Path:
    """Write a checkpoint of ``model`` (float32) into the run in ``directory``, as a learner of type ``dtype`` would.

    ``plan``: of the adapters that the model has, of which alone the checkpoint is; ``names``: theirs, if there are several.
    """
    path = directory / "checkpoints" / checkpoint_of(version, position)
    engine = path / ENGINE
    engine.mkdir(parents=True)
    written = [write_steps(engine, position)]
    for name, value in model.named_parameters():
        if plan is not None and not is_lora(name):
            continue
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
    trained = serving_weights(model, gathered=nullcontext, dtype=learner_dtype)
    layout = {"model": type(model).__name__, "parameters": "", "dtype": dtype, "optimizer": "AdamW"}
    if plan is not None:
        trained = ((name, tensor.to(learner_dtype)) for name, tensor in lora_weights(model, gathered=nullcontext))
        base = BaseDigest()
        base.add_all(serving_weights(model, gathered=nullcontext, dtype=learner_dtype, with_adapters=False))
        layout |= lora_layout(plan, names, Path("models/start"), base.digest().hex())
    found = []
    for name, tensor in trained:
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        found.append((name, str(tensor.dtype), tuple(tensor.shape), bytes_digest(data)))
    state = CheckpointState(policy_version=version, batch_position=position, mismatch={})
    write_metadata(path, state, layout, state_digest(found).hex())
    return path
