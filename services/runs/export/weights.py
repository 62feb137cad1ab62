"""Reads the weights of a checkpoint as inference engines load them, without ranks and without DeepSpeed.

A checkpoint stores float32 master weights in pieces (``gspo.moe.expert_layout``), whatever ranks and ZeRO stage wrote
them. The model is made without memory (on the device "meta"), with only names, shapes and types. One parameter at a time
is read, rounded to the learner's type as DeepSpeed rounds it, and given its serving names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gspo.model.serving import ServedTypes
from gspo.model.serving_layout import serving_tensors
from gspo.model_files.file_names import keep_names, load_config
from gspo.moe.expert_layout import pieces
from gspo_protocol.digests import bytes_digest, tensor_digest, version_digest
from gspo_protocol.messages import TensorInfo
from gspo_services.learner.checkpoints import (
    CheckpointError,
    DamagedCheckpoint,
    FileDigest,
    TensorDirectory,
    find_damage,
    read_metadata,
    state_digest,
)
from gspo_services.learner.weights import DTYPE_NAMES, DTYPES
from gspo_services.shared.runtime.errors import ConfigurationError

_ENGINE = "engine"
_KIND = "weight"


class CheckpointWeights:
    """One checkpoint's weights. Its files stay open until ``hold`` ends: the learner may remove the checkpoint meanwhile."""

    def __init__(self, checkpoint: Path, model_dir: Path, hold: ExitStack) -> None:
        """``model_dir``: the model that the run started from, for its configuration; its weights are not read.

        Raises: DamagedCheckpoint, CheckpointError; ConfigurationError when ``model_dir`` holds no such model.
        """
        self.path = checkpoint
        metadata = read_metadata(checkpoint)
        self._files: dict[str, Any] = metadata["files"]
        self.digest: str = metadata["weights_digest"]
        """The digest of the trained weights, as the learner took it."""
        self.layout: dict[str, Any] = metadata["layout"]
        self.learner_dtype: torch.dtype = DTYPES[self.layout["dtype"]]
        self._served: list[TensorInfo] = []
        self._tensors = TensorDirectory(checkpoint / _ENGINE, hold=hold)
        self.model = _bare_model(model_dir, self.learner_dtype)
        if type(self.model).__name__ != self.layout["model"]:
            raise ConfigurationError(
                f"{model_dir} is a {type(self.model).__name__}, and {checkpoint} holds a {self.layout['model']}: "
                "name the model that the run started from with --model"
            )

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def serving_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights under their serving names, in ``dtype``, one parameter in memory at a time.

        At its end, every bit has been compared with the digest that the learner computed of its own weights.
        Raises: DamagedCheckpoint, at the end, when they differ; CheckpointError when a parameter is missing.
        """
        self._served, types = [], ServedTypes(self.model, dtype)
        found: list[tuple[str, str, tuple[int, ...], str]] = []
        for name, tensor, (own_name, own) in self._learner_weights():
            found.append(_described(name, tensor))
            served = tensor.to(types.of(own_name, own))
            self._note(name, served)
            yield name, served
        if state_digest(found).hex() != self.digest:
            raise self._damage()

    def version_digest(self) -> str:
        """Return the digest of a policy version with these weights (``gspo_protocol.digests``), once ``serving_weights`` has
        ended."""
        return version_digest(self._served)

    def _note(self, name: str, served: Tensor) -> None:
        """Note what is given away, for ``version_digest``."""
        info = TensorInfo(
            name=name,
            dtype=DTYPE_NAMES[served.dtype],  # type: ignore[arg-type]
            shape=list(served.shape),
            offset=0,
            num_bytes=served.numel() * served.element_size(),
            digest=tensor_digest(_bytes(served)),
        )
        self._served.append(info)

    def _learner_weights(self) -> Iterator[tuple[str, Tensor, tuple[str, Tensor]]]:
        """Each with the parameter or buffer that it is of, and its name."""
        visited: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            # Tied weights exist once, under their first name.
            if id(value) in visited or not value.dim():
                continue
            visited.add(id(value))
            whole = self._read(name, value).to(value.dtype if not isinstance(value, nn.Parameter) else self.learner_dtype)
            for serving_name, tensor in serving_tensors(self.model, name, whole):
                yield serving_name, tensor.contiguous(), (name, value)

    def _read(self, name: str, value: Tensor) -> Tensor:
        """The float32 value of a parameter or buffer."""
        shape = tuple(value.shape)
        if not isinstance(value, nn.Parameter):
            return self._tensors.read(f"{name}/{_KIND}", 0, shape[0], shape)
        parts = [
            self._tensors.read(f"{piece.name}/{_KIND}", 0, shape[0], piece.shape(shape)) for piece in pieces(name, shape)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _damage(self) -> CheckpointError:
        """Say why the weights are not those that were saved."""
        try:
            where = find_damage(self.path, {name: FileDigest(**each) for name, each in self._files.items()}, 0, 1)
        except OSError as error:
            where = str(error)
        if where:
            return DamagedCheckpoint(f"{where}: export another checkpoint")
        return CheckpointError(
            f"{self.path}: its files are whole, but the weights that they give are not those that the learner had. Its "
            "model was probably loaded from another directory, or by another release of transformers; nothing was exported"
        )


def state_digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of tensors by name that a checkpoint stores for its weights."""
    return state_digest(_described(name, tensor) for name, tensor in tensors).hex()


def _described(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], str]:
    return name, str(tensor.dtype), tuple(tensor.shape), _digest(tensor)


def _digest(tensor: Tensor) -> str:
    return bytes_digest(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _bare_model(model_dir: Path, dtype: torch.dtype) -> Any:
    """Make the model without weights. Raises: ConfigurationError."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    if not (model_dir / "config.json").is_file():
        raise ConfigurationError(
            f"{model_dir} has no config.json: the export needs configuration and tokenizer of the model that the run "
            "started from; name its directory on this machine with --model DIR"
        )
    try:
        config, text = load_config(model_dir)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        keep_names(model, text)
        if (model_dir / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{model_dir}: {error}") from error
    return model
