"""DeepSpeed's checkpoints are read as data: no pickle in them can call anything."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

_FORCE: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_PLAIN: Final = [LossScaler, ZeroStageEnum, fragment_address]
"""Of DeepSpeed's own: a loss scale, an enumeration, two numbers. None of them does anything when it is made."""


@contextmanager
def weights_only_loads() -> Iterator[None]:
    """Within the block every torch.load of this process takes tensors, plain data and the classes of _PLAIN alone, also
    where its caller asks for more, as DeepSpeed does (weights_only=False).

    A file that holds anything else raises pickle.UnpicklingError before any of it is carried out.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_PLAIN):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
