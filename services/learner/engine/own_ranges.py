"""Which elements of each parameter this rank has anyway and publishes: each element on one rank. Nothing is gathered.

Under ZeRO-3 a rank publishes its partition, with experts in parallel its experts. What ranks have alike is split evenly
among them. A weight that is changed on its way, by an adapter or because engines have it transposed, is gathered: rank 0 has
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed
from torch import Tensor

from gspo.model.lora import adapted_weights
from gspo.model.serving import Gathered, ServedTypes, is_partitioned, served_parameter, served_values
from gspo.model.serving_layout import ServedPart, ServingLayout, serving_tensors
from gspo_services.learner.engine.expert_parallel import WHOLE, ExpertShare
from gspo_services.learner.weights import VersionLayout, VersionRange, in_order, parts_in_order, served_dtype


class PublishedRanges:
    """One rank's ranges of the versions of a model, in the order in which versions have them."""

    def __init__(
        self,
        model: Any,
        shares: Mapping[int, ExpertShare],
        serving: ServingLayout,
        dtype: torch.dtype,
        *,
        rank: int,
        num_ranks: int,
        gathered: Gathered,
    ) -> None:
        """``shares``: of experts. ``dtype``: in which floating-point weights are served. ``gathered``: see ``Gathered``.

        Raises: ValueError when a dtype cannot be sent, or two parameters are served under one name.
        """
        self._model = model
        self._shares = shares
        self._serving = serving
        self._types = ServedTypes(model, dtype)
        self._rank = rank
        self._num_ranks = num_ranks
        self._gathered = gathered
        self._begins: dict[str, int] = {}
        """Of each parameter, the first byte of what is served of it."""
        self._changed: set[str] = set()
        adapted, parts, begin = adapted_weights(model), list[tuple[ServedPart, str]](), 0
        for name, values in served_values(model):
            its_type = self._types.of(name, values[0])
            own = served_dtype(name, torch.empty(0, dtype=its_type))
            shape = self._whole_shape(values)
            places = self._places(name, shape)
            if places is None or name in adapted:
                self._changed.add(name)
            described = self._converted(name, values[0].dtype, shape) if places is None else places
            self._begins[name] = begin
            parts += [(part, own) for part in described]
            begin += sum(part.num_elements for part in described) * its_type.itemsize
        self.layout = VersionLayout.of(parts)
        """The same on all ranks."""

    def of_now(self) -> Iterator[VersionRange]:
        """Yield the ranges with their values now, valid until the next one is asked for. Collective where a weight is
        changed on its way."""
        adapted = adapted_weights(self._model)
        for name, values in served_values(self._model):
            begin, its_type = self._begins[name], self._types.of(name, values[0])
            if name not in self._changed:
                for start, own in self._own(values):
                    yield VersionRange(begin + start * its_type.itemsize, own.to(its_type))
                continue
            emits = self._rank == 0
            for each in served_parameter(
                name, values, self._serving, adapted.get(name), gathered=self._gathered, emit=emits, dtype=its_type
            ):
                for part in in_order(each):
                    yield VersionRange(begin, part.values)
                    begin += part.values.nbytes

    def _share(self, value: Tensor) -> ExpertShare:
        return self._shares.get(id(value), WHOLE)

    def _places(self, name: str, shape: Sequence[int]) -> list[ServedPart] | None:
        places = self._serving.places(name, shape)
        return None if places is None else parts_in_order(places, math.prod(shape))

    def _converted(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> list[ServedPart]:
        """What is served of a parameter that is not served as it lies, one after the other as it is converted."""
        whole = torch.zeros((), dtype=dtype).expand(*shape)
        return [ServedPart(each, tuple(tensor.shape), 0) for each, tensor in serving_tensors(self._model, name, whole)]

    def _whole_shape(self, values: Sequence[Tensor]) -> tuple[int, ...]:
        """Of the parameter that these are side by side, with the experts of all ranks."""
        first, *others = (_whole_shape(value, self._share(value)) for value in values)
        return (first[0], first[1] + sum(each[1] for each in others), *first[2:]) if others else first

    def _own(self, values: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's elements of the parameter that these are side by side, [any], with the place of the first in the
        whole, in row-major order."""
        if len(values) == 1:
            yield self._own_part(values[0])
            return
        blocks = [math.prod(_whole_shape(value, WHOLE)[1:]) for value in values]
        for index, (value, block) in enumerate(zip(values, blocks, strict=True)):
            place, own = self._own_part(value)
            while len(own):
                row, at = divmod(place, block)
                length = min(len(own), block - at)
                yield row * sum(blocks) + sum(blocks[:index]) + at, own[:length]
                place, own = place + length, own[length:]

    def _own_part(self, value: Tensor) -> tuple[int, Tensor]:
        """The place of this rank's first element in all of one of them, and its elements."""
        share = self._share(value)
        if is_partitioned(value):
            partition: Any = value
            local = partition.ds_tensor.detach().reshape(-1)
            begin = partition.ds_zero_partition_rank * partition.ds_tensor.ds_numel
            # The last partitions are padded.
            local = local[: max(0, min(len(local), partition.ds_numel - begin))]
            return share.index * partition.ds_numel + begin, local
        index, number = self._among_replicas(share)
        begin, end = (value.numel() * each // number for each in (index, index + 1))
        return share.index * value.numel() + begin, value.detach().reshape(-1)[begin:end]

    def _among_replicas(self, share: ExpertShare) -> tuple[int, int]:
        """This rank's number among those that have the same elements, and how many they are."""
        if share.replicas is None:
            return self._rank, self._num_ranks
        return torch.distributed.get_rank(share.replicas), torch.distributed.get_world_size(share.replicas)


def _whole_shape(value: Any, share: ExpertShare) -> tuple[int, ...]:
    """Of the parameter with the experts of all ranks."""
    local = tuple(value.ds_shape) if is_partitioned(value) else tuple(value.shape)
    return (share.num_shares * local[0], *local[1:]) if share.num_shares > 1 else local
