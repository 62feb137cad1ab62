"""Loads a model into ZeRO-3's partitions: every rank reads its own range of each parameter, and no rank ever has all of it.

DeepSpeed makes a parameter whole on every rank, sends rank 0's values to all, and keeps a part. Here the values are read
afterwards, so that whole parameters are only reserved memory, never touched, and nothing is sent. This relies on:

    zero.Init._zero_init_param   all that happens to a new parameter: it converts, broadcasts, and partitions
    parameter.ds_tensor          this rank's part: the flattened parameter, cut into equal parts; the last ones are padded
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from torch import Tensor, nn

from gspo.model_files.folder import ModelFilesError
from gspo.model_files.loading import WHOLE_MODEL, OwnRange, WeightPlaces
from gspo_services.learner.engine.configuration import deepspeed_config
from gspo_services.learner.start import EngineSettings

MOST_ERROR_BYTES: Final = 2000


def placement_of(settings: EngineSettings, model_config: Mapping[str, Any]) -> WeightPlaces:
    """Return where the weights of a model with this config.json go; the process group must exist."""
    device = torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else torch.device("cpu")
    if settings.learner.zero_stage < 3:
        return AgreedWhole(device)
    return OwnRanges(deepspeed_config(settings, model_config), device)


class OwnRangeInit(deepspeed.zero.Init):
    """``zero.Init`` for parameters that are about to be read: it does not send their values."""

    sends_values = False

    def _zero_init_param(self, param: Any) -> None:
        if self.sends_values:
            super()._zero_init_param(param)
            return
        self._convert_to_deepspeed_param(param)
        param.partition()


class OwnRanges:
    """The ``WeightPlaces`` of a model under ZeRO-3, on this rank."""

    def __init__(self, configuration: Mapping[str, Any], device: torch.device) -> None:
        """``configuration``: DeepSpeed's own; ``device``: of collectives."""
        self._configuration = dict(configuration)
        self._device = device

    @contextmanager
    def building(self) -> Iterator[None]:
        init = OwnRangeInit(config_dict_or_path=self._configuration)
        with init:
            yield
        # Later it also converts parameters that nobody reads: those of adapters, and of experts that ranks share.
        init.sends_values = True

    @contextmanager
    def converting(self) -> Iterator[None]:
        """Rank 0 reads the whole model, and all ranks convert it."""
        from transformers.integrations import HfDeepSpeedConfig

        # from_pretrained looks for a live object of this class.
        partition_while_loading = HfDeepSpeedConfig(self._configuration)
        yield
        del partition_while_loading

    def own_range(self, parameter: nn.Parameter) -> OwnRange:
        partitioned: Any = parameter
        part: Tensor = partitioned.ds_tensor
        start = torch.distributed.get_rank(partitioned.ds_process_group) * partitioned.ds_tensor.ds_numel
        length = max(0, min(part.numel(), partitioned.ds_numel - start))
        part[length:].zero_()
        return OwnRange(part[:length], start)

    def agree(self, error: ModelFilesError | None) -> None:
        agree_on_error(error, self._device)


class AgreedWhole:
    """The ``WeightPlaces`` of a model that every rank holds whole."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def building(self) -> AbstractContextManager[Any]:
        return WHOLE_MODEL.building()

    def converting(self) -> AbstractContextManager[Any]:
        return WHOLE_MODEL.converting()

    def own_range(self, parameter: nn.Parameter) -> OwnRange:
        return WHOLE_MODEL.own_range(parameter)

    def agree(self, error: ModelFilesError | None) -> None:
        agree_on_error(error, self._device)


def agree_on_error(error: ModelFilesError | None, device: torch.device) -> None:
    """Raise the error of the lowest rank that has one, on all ranks. Collective.

    Ranks of other machines read other copies of the files; one that ended alone would leave the others waiting.
    """
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    lowest = torch.tensor([world_size if error is None else rank], device=device)
    torch.distributed.all_reduce(lowest, op=torch.distributed.ReduceOp.MIN)
    source = int(lowest.item())
    if source == world_size:
        return
    # Padded: all ranks send as many bytes.
    own = (str(error) if error is not None else "").encode()[:MOST_ERROR_BYTES]
    text = torch.tensor(list(own.ljust(MOST_ERROR_BYTES)), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(text, src=source)
    shown = bytes(text.tolist()).decode(errors="ignore").rstrip()
    raise ModelFilesError(shown if world_size == 1 else f"rank {source}: {shown}") from error
