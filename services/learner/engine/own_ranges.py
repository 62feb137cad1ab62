"""Which elements of each parameter this rank has anyway and publishes: each element on one rank. Nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch import Tensor

from gspo.model.lora import is_lora, plain_name
from gspo.model.serving import is_partitioned
from gspo_services.learner.engine.expert_parallel import WHOLE, ExpertShare


@dataclass(frozen=True, kw_only=True)
class PublishedRange:
    """Some elements of a parameter or buffer, on the device on which this rank has them."""

    name: str
    shape: tuple[int, ...]
    """Of the whole, with the experts of all ranks."""
    start: int
    """The place of the first one in the whole, in row-major order."""
    values: Tensor
    """[any]"""


def own_ranges(model: Any, shares: Mapping[int, ExpertShare], *, rank: int, num_ranks: int) -> Iterator[PublishedRange]:
    """Yield this rank's range of each parameter and persistent buffer; tied ones once, adapters' matrices not.

    Under ZeRO-3 it is the rank's partition. What ranks have alike is split evenly among them. ``shares``: of experts.
    """
    visited: set[int] = set()
    for own_name, value in model.state_dict(keep_vars=True).items():
        if id(value) in visited or is_lora(own_name):
            continue
        visited.add(id(value))
        share = shares.get(id(value), WHOLE)
        if is_partitioned(value):
            local_shape, local = tuple(value.ds_shape), value.ds_tensor.detach().reshape(-1)
            begin = value.ds_zero_partition_rank * value.ds_tensor.ds_numel
            # The last partitions are padded.
            local = local[: max(0, min(len(local), value.ds_numel - begin))]
            num_local = value.ds_numel
        else:
            local_shape, num_local = tuple(value.shape), value.numel()
            index, number = _among_replicas(share, rank, num_ranks)
            begin, end = num_local * index // number, num_local * (index + 1) // number
            local = value.detach().reshape(-1)[begin:end]
        if len(local):
            shape = (share.num_shares * local_shape[0], *local_shape[1:]) if share.num_shares > 1 else local_shape
            yield PublishedRange(name=plain_name(own_name), shape=shape, start=share.index * num_local + begin, values=local)


def _among_replicas(share: ExpertShare, rank: int, num_ranks: int) -> tuple[int, int]:
    """This rank's number among those that have the same elements, and how many they are."""
    if share.replicas is None:
        return rank, num_ranks
    return torch.distributed.get_rank(share.replicas), torch.distributed.get_world_size(share.replicas)
