"""A learner's float32 weights and Adam moments, parameter by parameter, in files that any layout can read.

Each ZeRO stage keeps them in other places and other parts. One rank at a time puts a parameter together, writes it, and
drops it before the next. A learner with another stage, number of ranks or expert-parallel size reads the rows it needs.

    engine/
        model.norm.weight.safetensors                         "model.norm.weight/weight", "/exp_avg", "/exp_avg_sq"
        model.layers.0.mlp.experts.w1.0-of-2.safetensors      the first half of the experts' gates
        state.json                                            optimizer steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from gspo.model.serving import is_partitioned
from gspo.moe.expert_layout import pieces, stretches
from gspo_services.learner.checkpoints import TensorDirectory, TensorFile, read_steps, write_steps
from gspo_services.learner.engine.expert_parallel import WHOLE, ExpertShare
from gspo_services.learner.engine.spread_masters import spread

OPTIMIZER: Final = "AdamW"
_WEIGHT: Final = "weight"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_KINDS: Final = (_WEIGHT, *_MOMENTS)


@dataclass(frozen=True)
class _Place:
    """Where this rank's part of one parameter is."""

    master: Tensor
    offset: int
    """The part's offset in the flattened master."""
    start: int
    """Its offset in the flattened parameter."""
    length: int


@dataclass(frozen=True)
class _Fragment:
    """This rank's part of one parameter's state."""

    start: int
    """The fragment's offset in the flattened parameter."""
    values: Mapping[str, Tensor]
    """float32 [n] by kind: views, so that copying into them changes the state."""


@dataclass
class StateInParts:
    """One rank's part of a checkpoint: copies still to be written, and files."""

    copied: list[TensorFile] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    failure: OSError | None = None
    """The error of a file that could not be written."""


class OptimizerState:
    """The state of one DeepSpeed engine with torch's AdamW, in any ZeRO stage: of the parameters that are trained."""

    def __init__(
        self,
        engine: Any,
        zero_stage: int,
        shares: Mapping[int, ExpertShare],
        *,
        trained: Sequence[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        """``trained``: the optimizer's parameters, where others are frozen, which belong to the model that training began
        with, as do all buffers. None: every parameter is trained, and buffers are saved, too."""
        self._engine = engine
        self._zero_stage = zero_stage
        self._shares = shares
        self._trained = trained

    @property
    def num_steps(self) -> int:
        """Optimizer steps made so far."""
        counts = [state["step"] for state in self._adam().state.values()]
        # A fused Adam's are on the device: one read for all.
        return int(torch.stack(counts).max()) if counts else 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole pieces, all experts included: a checkpoint and a learner must have them in common."""
        return {
            piece.name: piece.shape(_whole_shape(parameter, self._share(parameter)))
            for name, parameter in self._parameters()
            for piece in pieces(name, _local_shape(parameter))
        }

    def save(self, directory: Path) -> list[Path]:
        """Write everything into ``directory``, and make it. Collective, and completes on all ranks.

        Returns the files that this rank wrote. Raises: OSError on ranks that could not write.
        """
        failure: OSError | None = None
        written: list[Path] = []
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            failure = error
        for file in self._files():
            # Raise later: the other ranks wait for this one in the next collective.
            if failure is None:
                failure = _failure(lambda file=file: file.write(directory), written)  # type: ignore[misc]
        if torch.distributed.get_rank() == 0 and failure is None:
            failure = _failure(lambda: write_steps(directory, self.num_steps), written)
        if failure is not None:
            raise failure
        return written

    def copy(self, directory: Path, budget_bytes: float) -> StateInParts:
        """Copy the tensors that this rank writes in ``save`` into CPU memory: 12 bytes for each parameter of its share.

        What would exceed ``budget_bytes`` is written into ``directory`` at once, parameter by parameter; it is made if need
        be. Collective, and completes on all ranks.
        """
        views = self._zero_stage == 0
        state, room = StateInParts(), budget_bytes
        for file in self._files():
            num_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
            if num_bytes <= room:
                room -= num_bytes
                own = {key: tensor.to("cpu", copy=views) for key, tensor in file.tensors.items()}
                state.copied.append(replace(file, tensors=own))
            elif state.failure is None:
                state.failure = _failure(lambda file=file: _write_below(file, directory), state.written)  # type: ignore[misc]
        return state

    def load(self, directory: Path) -> None:
        """Read what ``save`` wrote in any layout, for a model with the same ``shapes``. Collective.

        Raises: CheckpointError when the files do not hold it.
        """
        steps = read_steps(directory)
        files = TensorDirectory(directory)
        self._make_state()
        for name, parameter in self._parameters():
            fragment = self._fragment(parameter)
            if fragment is None:
                continue
            for kind, values in fragment.values.items():
                flat = _read(files, name, parameter, self._share(parameter), kind).reshape(-1)
                values.copy_(flat[fragment.start : fragment.start + values.numel()])
        for name, buffer in self._buffers().items():
            buffer.copy_(files.read(f"{name}/{_WEIGHT}", 0, buffer.shape[0], tuple(buffer.shape)))
        for master, state in self._adam().state.items():
            state["step"] = self._step_count(master, steps)
        self._weights_from_masters()

    def spread(self, seed: int, *, evenly: bool) -> None:
        """Spread the masters of a bfloat16 model, alike in every layout: see ``spread``. Only before the first step, for a
        new run."""
        for name, parameter in self._parameters():
            place = self._place(parameter)
            if place is None:
                continue
            share, shape = self._share(parameter), _local_shape(parameter)
            masters = place.master.detach().view(-1).narrow(0, place.offset, place.length)
            for stretch in stretches(
                name, shape, place.start, place.length, first_row=share.index * shape[0] if shape else 0
            ):
                spread(masters[stretch.begin : stretch.end], stretch.piece, stretch.first, seed, evenly=evenly)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._engine.module.named_parameters() if self._trained is None else self._trained)

    def _buffers(self) -> dict[str, Tensor]:
        if self._trained is not None:
            return {}
        values = self._engine.module.state_dict(keep_vars=True)
        return {name: value for name, value in values.items() if not isinstance(value, nn.Parameter) and value.dim() > 0}

    def _share(self, parameter: nn.Parameter) -> ExpertShare:
        return self._shares.get(id(parameter), WHOLE)

    def _adam(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer if self._zero_stage == 0 else self._engine.optimizer.optimizer
        assert isinstance(optimizer, torch.optim.AdamW)
        return optimizer

    def _masters(self) -> list[Tensor]:
        """Return the tensors that Adam steps on, on this rank, indexed by DeepSpeed's parameter group."""
        optimizer = self._engine.optimizer
        if self._zero_stage == 0:
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._zero_stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        if isinstance(optimizer, BF16_Optimizer):
            # DeepSpeed's choice for ZeRO 1 in bfloat16 with gradients summed in float32.
            return list(optimizer.fp32_groups_flat_partition)
        return list(optimizer.single_partition_of_fp32_groups)

    def _make_state(self) -> None:
        """Make Adam's moments, which it makes itself only in the first step."""
        states = self._adam().state
        for master in self._masters():
            if not states[master]:
                moments = {kind: torch.zeros_like(master, memory_format=torch.preserve_format) for kind in _MOMENTS}
                states[master].update(step=self._step_count(master, 0), **moments)

    def _step_count(self, master: Tensor, steps: int) -> Tensor:
        """Adam's count for one tensor, never shared: each would increment it. A fused Adam wants it beside the tensor."""
        fused = any(group.get("fused") for group in self._adam().param_groups)
        return torch.tensor(float(steps), dtype=torch.float32, device=master.device if fused else "cpu")

    def _fragment(self, parameter: Any) -> _Fragment | None:
        """Return this rank's fragment; None when all of the parameter's state is on other ranks."""
        place = self._place(parameter)
        if place is None:
            return None
        state = self._adam().state[place.master]
        tensors = {_WEIGHT: place.master.detach(), **{kind: state[kind] for kind in _MOMENTS}}
        views = {kind: tensor.view(-1).narrow(0, place.offset, place.length) for kind, tensor in tensors.items()}
        return _Fragment(place.start, views)

    def _place(self, parameter: Any) -> _Place | None:
        """Return where this rank's part of a parameter is; None when all of it is on other ranks."""
        if self._zero_stage == 0:
            return _Place(parameter, 0, 0, parameter.numel())
        optimizer = self._engine.optimizer
        if self._zero_stage == 3:
            group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = length * torch.distributed.get_rank(parameter.ds_process_group)
            # The last partitions are padded.
            length = min(length, parameter.ds_numel - start)
            return None if length <= 0 else _Place(self._masters()[group], offset, start, length)
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        master = self._masters()[mapping.param_group_index]
        return _Place(
            master, mapping.hp_fragment_address.start, mapping.lp_fragment_address.start, mapping.hp_fragment_address.numel
        )

    def _collect(self, parameter: Any, kind: str, share: ExpertShare, writer: int) -> Tensor | None:
        """One kind of this rank's share, whole, float32, on ``writer``. Collective among the share's replicas."""
        fragment = self._fragment(parameter)
        shape = _local_shape(parameter)
        if self._zero_stage == 0:
            assert fragment is not None
            return fragment.values[kind].view(shape) if torch.distributed.get_rank() == writer else None
        # Summed as integers: 0 + x is x, bit for bit, whereas in floating point -0.0 would lose its sign.
        bits = torch.zeros(torch.Size(shape).numel(), dtype=torch.int32, device=self._engine.device)
        if fragment is not None:
            values = fragment.values[kind]
            bits[fragment.start : fragment.start + values.numel()] = values.view(torch.int32)
        torch.distributed.reduce(bits, dst=writer, group=share.replicas)
        return bits.view(torch.float32).view(shape) if torch.distributed.get_rank() == writer else None

    def _files(self) -> Iterator[TensorFile]:
        """Yield the files that this rank writes, parameter by parameter; views of the state without ZeRO, otherwise new
        tensors. Collective; must be exhausted.
        """
        self._make_state()
        for index, (name, parameter) in enumerate(self._parameters()):
            share = self._share(parameter)
            members = torch.distributed.get_process_group_ranks(share.replicas)
            writer = members[index % len(members)]
            whole = {kind: self._collect(parameter, kind, share, writer) for kind in _KINDS}
            if torch.distributed.get_rank() == writer:
                yield _file(name, share, whole)
        if torch.distributed.get_rank() == 0:
            buffers = {f"{name}/{_WEIGHT}": value.to(torch.float32, copy=True) for name, value in self._buffers().items()}
            if buffers:
                yield TensorFile(stem="buffers", tensors=buffers)

    def _weights_from_masters(self) -> None:
        """Set the weights of forward passes: rounded to the model's type, whole on every rank or partitioned. Collective."""
        optimizer = self._engine.optimizer
        if self._zero_stage == 3:
            optimizer.checkpoint_event_prologue()
            for group in range(len(self._masters())):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            optimizer.checkpoint_event_epilogue()
        elif self._zero_stage > 0:
            optimizer.update_lp_params()


def _local_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(parameter.ds_shape if is_partitioned(parameter) else parameter.shape)


def _whole_shape(parameter: nn.Parameter, share: ExpertShare) -> tuple[int, ...]:
    first, *others = _local_shape(parameter)
    return (first * share.num_shares, *others)


def _file(name: str, share: ExpertShare, whole: Mapping[str, Tensor | None]) -> TensorFile:
    tensors: dict[str, Tensor] = {}
    num_rows = 0
    for kind, tensor in whole.items():
        assert tensor is not None
        num_rows = tensor.shape[0]
        tensors |= {f"{piece.name}/{kind}": piece.of(tensor) for piece in pieces(name, tensor.shape)}
    stem = name if share.num_shares == 1 else f"{name}.{share.index}-of-{share.num_shares}"
    return TensorFile(stem=stem, tensors=tensors, first_row=share.index * num_rows)


def _failure(write: Callable[[], Path], written: list[Path]) -> OSError | None:
    try:
        written.append(write())
    except OSError as error:
        return error
    return None


def _write_below(file: TensorFile, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return file.write(directory)


def _read(files: TensorDirectory, name: str, parameter: nn.Parameter, share: ExpertShare, kind: str) -> Tensor:
    """This rank's share of a parameter's state, whichever shares wrote it."""
    shape = _local_shape(parameter)
    parts = [
        files.read(f"{piece.name}/{kind}", share.index * shape[0], shape[0], piece.shape(shape))
        for piece in pieces(name, shape)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
