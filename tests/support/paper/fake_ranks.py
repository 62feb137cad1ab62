"""One rank of many, on a GPU without memory: the learner's real engine under DeepSpeed, with fake tensors and collectives
that do nothing.

Everything is on the device "cpu", because activation checkpointing crashes on a fake device of another kind; the branches
of a GPU are taken all the same. A run needs a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import deepspeed.ops
import torch
import torch.distributed
import torch.distributed._tools.fake_collectives  # what collectives do to fake tensors
from deepspeed.module_inject import auto_ep_layer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from gspo.model import attention
from gspo_services.learner.start import autoep_config

GPUS_OF_A_NODE: Final = 8


@contextlib.contextmanager
def fake_ranks(num_ranks: int, *, on_gpu: bool = True) -> Iterator[None]:
    """Everything inside is fake, and this process is rank 0 of ``num_ranks``. ``on_gpu``: take the branches of a GPU."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": min(num_ranks, GPUS_OF_A_NODE)}
    os.environ.update({name: str(value) for name, value in place.items()})
    # It would be compiled.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name, value in {**(_OF_A_GPU if on_gpu else {}), **_OF_FAKES, **_OF_EXPERTS, **_OF_RANKS}.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield
    torch.distributed.destroy_process_group()


def _stays(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    """``Module.to``, which cannot replace fake parameters: they are where they are wanted."""
    return module


_OF_A_GPU: Final[dict[str, Any]] = {
    "gspo.model.attention._attended": attention._flash,
    "gspo.model.logprobs.chunks.on_gpu": lambda _: True,
    "gspo.model.logprobs.chunks._free_bytes": lambda _: 2**40,
    # transformers asks CUDA what it can do.
    "transformers.integrations.moe._can_use_grouped_mm": lambda given, *_: given.dtype == torch.bfloat16,
}
_OF_FAKES: Final[dict[str, Any]] = {
    "torch.nn.Module.to": _stays,
    # AdamW divides by a power of the number of its step.
    "torch.optim.adam._get_value": lambda _: 1.0,
    "gspo_services.learner.engine.engine.init_distributed": lambda *_: None,
    "gspo_services.learner.engine.engine.limit_waiting": lambda *_: None,
}


def _same(*_: Any) -> None:
    """Other ranks have the same, says a check that would compare values."""


_OF_RANKS: Final[dict[str, Any]] = {
    "deepspeed.runtime.zero.partition_parameters.assert_ints_same_as_other_ranks": _same,
    "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks": _same,
}


def _even_split(
    selected_experts: Tensor, num_experts: int, ep_size: int, num_local_experts: int, *_: Any, **__: Any
) -> auto_ep_layer.SplitPlan:
    """Each rank has as many picks for every other."""
    share = [selected_experts.numel() // ep_size] * ep_size
    counts = selected_experts.new_empty((ep_size, num_local_experts), dtype=torch.int32)
    return auto_ep_layer.SplitPlan(input_splits=share, output_splits=share, local_counts_by_source=counts)


def _permutation(counts: Tensor, num_local_experts: int, *rest: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What ``generate_permute_indices`` returns, without the values."""
    padded = rest[1]
    return (
        counts.new_empty(padded, dtype=torch.int32),
        counts.new_empty(num_local_experts, dtype=torch.int32),
        counts.new_empty(num_local_experts, dtype=torch.int32),
    )


_OF_EXPERTS: Final[dict[str, Any]] = {
    # On a stream of its own, the sizes would be copied to the host.
    "gspo_services.learner.engine.configuration.autoep_config": lambda size, config, **_: autoep_config(
        size, config, on_cuda=False
    ),
    "deepspeed.module_inject.auto_ep_layer.compute_split_plan": _even_split,
    "deepspeed.moe.ep_kernels.generate_permute_indices": _permutation,
    "deepspeed.moe.ep_kernels.permute_rows_supported": lambda rows: rows.dim() == 2,
    # A kernel in Triton.
    "deepspeed.moe.ep_kernels.gather_rows": lambda rows, index: rows.index_select(0, index),
}
