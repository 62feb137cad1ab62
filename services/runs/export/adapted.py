"""The weights of a checkpoint of adapters: the model that they belong to, read from its files, with the adapters merged.

Neither the model nor its learner is made: one serving tensor is read, changed and given away at a time. Both parts are
compared with the digests that the learner took: the adapters', and that of the model below them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gspo.model.lora import (
    LoraPlan,
    adapted_weights,
    add_change,
    change,
    inject_lora,
    is_lora,
    lora_config,
    lora_name,
    part_of,
    plain_name,
)
from gspo.model.serving_layout import serving_tensors
from gspo_services.learner.checkpoints import BaseDigest, read_metadata
from gspo_services.runs.export.weights import CheckpointWeights, state_digest_of
from gspo_services.shared.runtime.errors import ConfigurationError

PEFT_PREFIX = "base_model.model."
"""Of every name in a file of peft's."""


def open_checkpoint(checkpoint: Path, model_dir: Path, hold: ExitStack) -> CheckpointWeights:
    """The weights of a checkpoint, or of the adapters in it and their model; see the two classes."""
    has_lora = read_metadata(checkpoint)["layout"].get("lora") is not None
    return (AdaptedCheckpointWeights if has_lora else CheckpointWeights)(checkpoint, model_dir, hold)


class AdaptedCheckpointWeights(CheckpointWeights):
    """One checkpoint's adapters, and the weights of its model with them. See ``CheckpointWeights``."""

    def __init__(self, checkpoint: Path, model_dir: Path, hold: ExitStack) -> None:
        """``model_dir``: the model that the run started from; its weights are read, too.

        Raises: DamagedCheckpoint, CheckpointError; ConfigurationError when ``model_dir`` holds no such model.
        """
        super().__init__(checkpoint, model_dir, hold)
        lora = self.layout["lora"]
        self.names: Sequence[str] = lora.get("adapters", ())
        """Of several adapters."""
        self.plan = LoraPlan(
            rank=lora["rank"],
            alpha=lora["alpha"],
            target_modules=tuple(lora["target_modules"]),
            num_adapters=max(1, len(self.names)),
        )
        self._model_dir = model_dir
        self._base = _BaseFiles(model_dir, hold)
        with torch.device("meta"):
            inject_lora(self.model, self.plan, seed=0)

    @property
    def num_parameters(self) -> int:
        return sum(value.numel() for name, value in self.model.named_parameters() if not is_lora(name))

    def own_part(self, matrices: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
        """What of ``adapter_tensors`` is the adapter ``name``; all, where there is one."""
        if not self.names:
            return matrices
        place, rank = self.names.index(name), self.plan.rank
        return {key: part_of(matrix, key, place, rank).contiguous() for key, matrix in matrices.items()}

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The adapters' matrices in the learner's type, under the names of ``gspo.model.serving.lora_weights``.

        Raises: DamagedCheckpoint, CheckpointError when they are not those that the learner had.
        """
        found = {
            lora_name(name): self._read(name, value).to(self.learner_dtype)
            for name, value in self.model.named_parameters()
            if is_lora(name)
        }
        if state_digest_of(found.items()) != self.digest:
            raise self._damage()
        return found

    def peft_config(self) -> Any:
        """peft's configuration of these adapters, or of each of several."""
        config = lora_config(replace(self.plan, num_adapters=1))
        config.base_model_name_or_path = str(self._model_dir)
        config.inference_mode = True
        return config

    def serving_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """As ``CheckpointWeights.serving_weights``. Raises ConfigurationError, at the end, when ``model_dir`` holds another
        model than the one that the adapters belong to."""
        if self.names:
            raise ConfigurationError(
                f"{self.path} has the adapters {', '.join(self.names)}, and merged weights would have one of them: export "
                "them with --adapter, and merge one with peft's merge_and_unload"
            )
        matrices, adapted = self.adapter_tensors(), adapted_weights(self.model)
        self._served = []
        digest, visited = BaseDigest(), set[int]()
        for own_name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in visited or is_lora(own_name) or not value.dim():
                continue
            visited.add(id(value))
            name = plain_name(own_name)
            weight = adapted.get(name)
            shown = value
            if weight is not None:
                shown = change(weight, matrices[f"{weight.name}.lora_A.weight"], matrices[f"{weight.name}.lora_B.weight"])
            for serving_name, its_change in serving_tensors(self.model, name, shown):
                base = self._base.read(serving_name, tuple(its_change.shape))
                # Rounded before it is changed, as in the learner.
                base = base.to(self.learner_dtype) if base.is_floating_point() else base
                digest.add(serving_name, base)
                served = base if weight is None else add_change(base, its_change)
                served = served.to(dtype) if served.is_floating_point() else served
                self._note(serving_name, served)
                yield serving_name, served.contiguous()
        if digest.digest().hex() != self.layout["base"]:
            raise ConfigurationError(
                f"{self._model_dir} is not the model that {self.path} was trained on, which was at "
                f"{self.layout['base_path']}, with digest {self.layout['base']}; this one has {digest.digest().hex()}: name "
                "that model with --model DIR"
            )


class _BaseFiles:
    """The tensors of a model's directory, by name."""

    def __init__(self, model_dir: Path, hold: ExitStack) -> None:
        """Raises: ConfigurationError."""
        self._model_dir = model_dir
        self._files: dict[str, Any] = {}
        for path in self._paths():
            try:
                file = hold.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigurationError(f"{path} cannot be read: {error}; download or save the model again") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises: ConfigurationError when there is no such tensor of this shape."""
        file = self._files.get(name)
        found: Tensor | None = None if file is None else file.get_tensor(name)
        if found is None or tuple(found.shape) != shape:
            what = "is not there" if found is None else f"has the shape {list(found.shape)}, not {list(shape)}"
            raise ConfigurationError(
                f"{self._model_dir}: {name} {what}: name the model that the run started from with --model DIR, or save it "
                "again with save_pretrained"
            )
        return found

    def _paths(self) -> list[Path]:
        index = self._model_dir / "model.safetensors.index.json"
        if not index.is_file():
            return sorted(self._model_dir.glob("*.safetensors"))
        try:
            names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigurationError(f"{index} cannot be read: {error}; download or save the model again") from error
        if odd := next((name for name in sorted(names) if "/" in name or not name.endswith(".safetensors")), ""):
            raise ConfigurationError(f"{index} names {odd[:100]!r}, which is no safetensors file; download the model again")
        return [self._model_dir / name for name in sorted(names)]
