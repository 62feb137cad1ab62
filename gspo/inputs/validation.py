"""Checks of per-token tensors; every ValueError names the argument, the index and the value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


_values_are_trusted: ContextVar[bool] = ContextVar("_values_are_trusted", default=False)


@contextmanager
def trusted_values() -> Iterator[None]:
    """Check shapes and types inside, but no values: to read a value, the host must wait for the device.

    For a caller that checked the values where they were made, and looks for NaN in the results: non-finite values
    pass through to the loss and the statistics, and an id out of range is an error of the device.
    """
    token = _values_are_trusted.set(True)
    try:
        yield
    finally:
        _values_are_trusted.reset(token)


def values_are_trusted() -> bool:
    """Return whether this is inside ``trusted_values``."""
    return _values_are_trusted.get()


def require_vector(name: str, values: Tensor, length: int | None = None) -> None:
    """Raise ValueError unless ``values`` is one-dimensional and has ``length`` elements."""
    if values.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; give a flat vector, or rows to gspo.padded_loss")
    if length is not None and values.shape[0] != length:
        raise ValueError(f"{name} has {values.shape[0]} elements where {length} are needed")


def require_precise(name: str, values: Tensor) -> None:
    """Raise ValueError unless ``values`` is float32 or float64."""
    if values.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{name} is {values.dtype}; give float32: half precision cannot represent a clip range of 3e-4 around 1. "
            "Compute log-probs from logits in float32: a later cast does not bring the digits back"
        )


def require_mask(name: str, mask: Tensor) -> None:
    """Raise ValueError unless ``mask`` is boolean: a fractional mask would redefine sequence lengths."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} is {mask.dtype}; give torch.bool, True at action tokens")


def require_finite(name: str, values: Tensor, where: Tensor | None = None) -> None:
    """Raise ValueError naming the first non-finite element (among those where ``where`` holds)."""
    if values_are_trusted():
        return
    bad = ~torch.isfinite(values)
    _refuse_first(name, values, bad if where is None else bad & where, "give finite numbers")


def require_ids(name: str, ids: Tensor, limit: int, where: Tensor | None = None) -> None:
    """Raise ValueError unless ``ids`` are integers in [0, limit) (where ``where`` holds)."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} is {ids.dtype}; give int64 ids")
    if values_are_trusted():
        return
    wide = ids.long()  # 2**31 does not fit into an int32 comparison
    bad = (wide < 0) | (wide >= limit)
    _refuse_first(name, ids, bad if where is None else bad & where, f"ids lie in [0, {limit})")


def require_not_negative(name: str, values: Tensor) -> None:
    """Raise ValueError naming the first element below zero."""
    _refuse_first(name, values, values < 0, "give numbers of at least 0")


def _refuse_first(name: str, values: Tensor, bad: Tensor, way_out: str) -> None:
    if values_are_trusted() or not bool(bad.any()):
        return
    index = int(torch.nonzero(bad)[0, 0])
    raise ValueError(f"{name}[{index}] is {values[index].item()}; {way_out}")
