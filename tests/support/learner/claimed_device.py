"""A device that a CPU only claims: its tensors are cpu:0, the host's are cpu. What makes the host wait is counted by line.

PyTorch takes both names for the same memory, so all values are real; code that passes devices on keeps the two apart. Of a
GPU it says nothing more: kernels, streams and what asks only for ``device.type`` are those of the host.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

DEVICE: Final = torch.device("cpu", 0)
_ROOT: Final = f"{Path(__file__).parents[3]}/"
# What CUDA computes only once the host has read a size or a value.
_READING: Final = (
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
)
_BETWEEN: Final = ("/torch/", "typing_extensions.py")
_TO_HOST: Final = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__)
# The host's tensors may take part: copies, and the collectives of gloo.
_MAY_MIX: Final = ("copy_", "_to_copy", "c10d::")


class ClaimedDevice:
    """``with ClaimedDevice() as claimed:`` around everything that makes or uses a device's tensors, on one thread."""

    def __init__(self) -> None:
        self._there = WeakIdKeyDictionary()
        """The storages on the device."""
        self._found: Counter[str] = Counter()
        self._modes = (_Operations(self), _Calls(self))

    def __enter__(self) -> ClaimedDevice:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)

    def has(self, value: object) -> bool:
        """Whether it is a tensor on the device."""
        return isinstance(value, Tensor) and value.untyped_storage() in self._there

    def place(self, values: Any, *, there: bool) -> None:
        """Say where the tensors among ``values`` are."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and there:
                self._there[tensor.untyped_storage()] = True
            elif isinstance(tensor, Tensor):
                self._there.pop(tensor.untyped_storage(), None)

    def take(self) -> dict[str, int]:
        """Return since the last call how often the host waited ("waits: ...") or an operation had tensors of both devices
        ("mixes: ..."), by kind and line."""
        found, self._found = dict(self._found), Counter()
        return found

    def note(self, kind: str) -> None:
        """Count it at the innermost line of this project, and of the library that it called."""
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        outside = [frame for frame in frames if not any(part in frame.filename for part in _BETWEEN)]
        own = [frame for frame in frames if frame.filename.startswith(_ROOT) and "/site-packages/" not in frame.filename]
        parts = [_short(own[-1])] if own else []
        if outside and outside[-1] not in own:
            parts.append(_short(outside[-1]))
        self._found[f"{kind} at {' in '.join(parts) or 'backward'}"] += 1


class _Calls(TorchFunctionMode):
    """Calls that are no operation where both devices are one memory."""

    def __init__(self, claimed: ClaimedDevice) -> None:
        super().__init__()
        self._claimed = claimed

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, claimed, first = kwargs or {}, self._claimed, args[0] if args else None
        there = claimed.has(first)
        if func is Tensor.backward:
            # PyTorch leaves the mode before it calls ``func``, and with it whatever backward computes again.
            with self:
                return torch.autograd.backward(first, kwargs.pop("gradient", None), **kwargs)
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if there else func(*args, **kwargs)
        if there and func in _TO_HOST:
            claimed.note(f"waits: {func.__name__}")
            if func is not Tensor.cpu:
                return func(*args, **kwargs)
            result = first.clone()
            claimed.place(result, there=False)
            return result
        named = [*args[1:], kwargs.get("device")] if func is Tensor.to else [kwargs.get("device")]
        target = next((torch.device(x) for x in named if isinstance(x, torch.device | str)), None)
        result = func(*args, **kwargs)
        if target is None or not isinstance(result, Tensor):
            return result
        if func is Tensor.to and there != (target == DEVICE):
            # ``func`` may have returned the same tensor.
            result = result.clone() if result.data_ptr() == first.data_ptr() else result
            if there or not kwargs.get("non_blocking"):
                claimed.note("waits: to the host" if there else "waits: upload")
        if func is torch.tensor and target == DEVICE:
            claimed.note("waits: upload by torch.tensor")
        claimed.place(result, there=target == DEVICE)
        return result


class _Operations(TorchDispatchMode):
    """Each operation: what comes of the device's tensors is there, too."""

    def __init__(self, claimed: ClaimedDevice) -> None:
        super().__init__()
        self._claimed = claimed

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, claimed, name = kwargs or {}, self._claimed, func.name().removeprefix("aten::").partition(".")[0]
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        there = [value for value in given if claimed.has(value)]
        if there:
            self._judge(name, args, kwargs, given)
        result = func(*args, **kwargs)
        if not given and torch._C._current_graph_task_id() != -1:
            # Made by C++ in backward, where no call is seen that names the device.
            claimed.place(result, there=True)
        elif there and name not in ("copy_", "set_"):
            claimed.place(result, there=True)
        return result

    def _judge(self, name: str, args: Sequence[Any], kwargs: Any, given: Sequence[Tensor]) -> None:
        claimed = self._claimed
        if name in _READING:
            claimed.note(f"waits: {name}")
        crosses = name == "copy_" and claimed.has(args[0]) != claimed.has(args[1])
        if crosses and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            claimed.note("waits: copy_")
        strangers = [value for value in given if not claimed.has(value)]
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype == torch.bool for index in indices) and not _is_fill(args[2:]):
                claimed.note("waits: index by a mask")
            if any(value is index for value in strangers for index in indices):
                claimed.note("waits: upload of an index")
            strangers = [value for value in strangers if not any(value is index for index in indices)]
        # A number may be the host's. A fused Adam reads its counts of steps on the device.
        strangers = [value for value in strangers if value.dim() > 0 or name.startswith("_fused_")]
        if strangers and not name.startswith(_MAY_MIX):
            claimed.note(f"mixes: {name} with the host's {list(strangers[0].shape)}")


def _is_fill(rest: Sequence[Any]) -> bool:
    """Of one number: CUDA fills by the mask, without counting what it selects."""
    return bool(rest) and isinstance(rest[0], Tensor) and rest[0].numel() == 1


def _short(frame: traceback.FrameSummary) -> str:
    filename = frame.filename.removeprefix(_ROOT).removeprefix("names/").rpartition("site-packages/")[2]
    return f"{filename}:{frame.lineno}"
