"""A device "gpu" without memory, for PyTorch without CUDA: shapes, types and devices of every operation are checked, and
nothing is computed. Code takes the branches of a GPU there.

Fake tensors refuse to be mixed with the host's, to be read, and to have a size that their values decide. They do not refuse
to be copied to the host: ``Operations`` counts that.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

GPU: Final = "gpu"
# For the whole process.
_setup_privateuseone_for_python_backend(GPU)
_ROOT: Final = f"{Path(__file__).parents[3]}/"
Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Everything inside is fake; ``from_tensor`` of the mode brings tensors of the host in."""
    make = torch.tensor

    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """Made on the host and copied, as CUDA does it."""
        made = make(data, dtype=dtype, device="cpu")
        # Else the copy would be made for real, by a device that is not there.
        made.constant = None  # type: ignore[attr-defined]
        return made.to(device or "cpu")

    with (
        FakeTensorMode() as mode,
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: self.device.type == GPU)),
        # transformers asks CUDA what it can do.
        mock.patch("transformers.integrations.moe._can_use_grouped_mm", lambda given, *_: given.dtype == torch.bfloat16),
        mock.patch("gspo.model.logprobs.chunks._free_bytes", return_value=2**40),
    ):
        yield mode


def moved(model: Model) -> Model:
    """``model.to(GPU)``, which cannot replace fake parameters. Tied ones stay tied."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = done.setdefault(id(parameter), nn.Parameter(parameter.detach().to(GPU)))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(GPU)
    return model


class Operations(TorchDispatchMode):
    """Counts operations by name, and copies between host and device by line."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names[func.name().partition(".")[0]] += 1
        given = next((value for value in args if isinstance(value, Tensor)), None)
        if given is not None and isinstance(result, Tensor) and given.device.type != result.device.type:
            self.copies[f"{given.device.type} -> {result.device.type} at {own_line(traceback.extract_stack())}"] += 1
        return result


def own_line(frames: traceback.StackSummary) -> str:
    """The innermost line of this project, as FILE:LINE."""
    own = [frame for frame in frames if frame.filename.startswith(_ROOT) and "/site-packages/" not in frame.filename]
    own = [frame for frame in own if frame.filename != __file__]
    return f"{own[-1].filename.removeprefix(_ROOT).removeprefix('names/')}:{own[-1].lineno}" if own else "backward"
