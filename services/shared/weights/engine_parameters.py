"""Builds an engine's parameters from a checkpoint's tensors, without torch: to compare checksums, to patch them in place.

SGLang's /weights_checker hashes each parameter as it lies in memory, where SGLang has merged tensors that a checkpoint
keeps apart (``shards`` has what each of several ranks holds). All merges are along the first dimension, so they are
concatenations of bytes:

    self_attn.qkv_proj.weight                     q_proj, k_proj, v_proj
    self_attn.fused_qkv_a_proj_with_mqa.weight    q_a_proj, kv_a_proj_with_mqa (latent attention with both)
    linear_attn.in_proj_qkvz.weight               in_proj_qkv, in_proj_z
    linear_attn.in_proj_ba.weight                 in_proj_b, in_proj_a
    mlp.gate_up_proj.weight                       gate_proj, up_proj; of shared experts, too
    experts.w13_weight                            gate_proj, up_proj (or w1, w3) of each expert in turn; or input_linear
    experts.w2_weight                             down_proj (or w2) of each expert in turn; or output_linear
    embed_tokens, lm_head                         padded with zero rows to a multiple of 64, but for Gemma 3's
    everything else                               as it is, under its own name

Where a checkpoint stacks experts as gate_up_proj and down_proj, SGLang has each of these matrices transposed. In models with
linear attention it leaves out ``self_attn``. Of a checkpoint that also takes images only the text model is sent
(``gspo.model_files.text_model``); Qwen3.5's class has it under ``model.`` where files say ``model.language_model.``. The
engine has the other towers from its start. The hashes are in ``checksums``.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np

from gspo.model_files.text_model import INSIDE, TEXT_TOWER
from gspo_protocol.messages import TensorInfo
from gspo_services.shared.weights.checksums import Checksum
from gspo_services.shared.weights.spread import VOCAB_ROWS

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"

_ATTENTION: Final = re.compile(r"(?P<prefix>.*\.self_attn)\.(?P<part>[qkv])_proj\.(?P<kind>weight|bias)")
_EXPERT: Final = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[132])\.weight"
)
_MLP: Final = re.compile(
    r"(?P<prefix>.*\.(?:mlp|shared_experts|shared_expert))\.(?P<part>gate|up)_proj\.(?P<kind>weight|bias)"
)
_LATENT: Final = re.compile(r"(?P<prefix>.*\.self_attn)\.(?P<part>q_a_proj|kv_a_proj_with_mqa)\.weight")
_W13: Final = ("gate_proj", "up_proj", "w1", "w3")
_LINEAR: Final = re.compile(r"(?P<prefix>.*\.linear_attn\.in_proj_)(?P<part>qkv|z|b|a)\.weight")
_MERGED_LINEAR: Final = {"qkv": ("qkvz", 0), "z": ("qkvz", 1), "b": ("ba", 0), "a": ("ba", 1)}
_TRANSPOSED: Final = (".experts.gate_up_proj", ".experts.down_proj")
_STACKED: Final = {
    ".experts.gate_up_proj": ".experts.w13_weight",
    ".experts.down_proj": ".experts.w2_weight",
    ".experts.gate_up_proj_bias": ".experts.w13_weight_bias",
    ".experts.down_proj_bias": ".experts.w2_weight_bias",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.w13_weight",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.w2_weight",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.gate.weight",
}
"""Endings of tensors that are parameters under another name."""
_WHOLE: Final = ()
"""The position of a tensor that is a parameter of its own."""
_DERIVED: Final = "gemma_weight"

Buffer = bytes | bytearray | memoryview
Described = tuple[str, tuple[int, ...], int]
"""A tensor's name, shape and bytes."""
Matrix = tuple[int, int, int]
"""Rows, columns, and the bytes of an element."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An engine parameter: the sent tensors that it consists of, in its order."""

    name: str
    tensors: list[str]
    indices: list[int]
    """The places of these tensors among those that were sent."""
    padding_bytes: int
    """The number of zero bytes after them."""
    complete: bool
    matrix: Matrix | None = None
    """Of the tensor, where the engine has each of its matrices transposed."""


@dataclass(frozen=True, kw_only=True)
class Parameter(Layout):
    """An engine parameter with its bytes: ``parts``, in the parameter's order, padding included."""

    parts: list[Buffer]


def layouts(tensors: Sequence[TensorInfo]) -> dict[str, Layout]:
    """Return the engine's parameters made of checkpoint tensors, by name. Raises: ValueError for a tensor sent twice."""
    return dict(layouts_of(described(tensors)))


def described(tensors: Sequence[TensorInfo]) -> tuple[Described, ...]:
    """Return what is the same in all versions of a run, so that thousands of names are matched only once."""
    return tuple((info.name, tuple(info.shape), info.num_bytes) for info in tensors)


@lru_cache(maxsize=2)
def layouts_of(tensors: tuple[Described, ...]) -> dict[str, Layout]:
    """Return ``layouts`` of tensors that were described; the caller must not change it."""
    places: dict[str, dict[tuple[int, ...], int]] = {}
    names = {tensor for tensor, _, _ in tensors}
    is_linear = any(".linear_attn." in name for name in names)
    for index, (tensor, _, _) in enumerate(tensors):
        name, place = _place(tensor, names)
        if is_linear:
            name = name.replace(".self_attn.", ".")
        parts = places.setdefault(name, {})
        if place in parts:
            raise ValueError(f"tensor {tensor} was sent twice")
        parts[place] = index
    padded = _pads_vocabulary(names)
    return {name: _layout(name, parts, tensors, padded=padded) for name, parts in places.items()}


def merge(tensors: Iterable[tuple[TensorInfo, Buffer]]) -> dict[str, Parameter]:
    """Build the engine's parameters, by name, from checkpoint tensors. Raises: ValueError for a tensor sent twice."""
    sent = list(tensors)
    return {
        name: Parameter(
            name=name,
            tensors=layout.tensors,
            indices=layout.indices,
            padding_bytes=layout.padding_bytes,
            complete=layout.complete,
            matrix=layout.matrix,
            parts=parts_of(layout, [data for _, data in sent]),
        )
        for name, layout in layouts([info for info, _ in sent]).items()
    }


def parts_of(layout: Layout, data: Sequence[Buffer]) -> list[Buffer]:
    """Return the bytes of a parameter, in pieces, from those of all sent tensors."""
    parts = [data[index] if layout.matrix is None else transposed(data[index], layout.matrix) for index in layout.indices]
    return [*parts, bytearray(layout.padding_bytes)] if layout.padding_bytes else parts


def is_vocabulary(name: str) -> bool:
    """Tell whether a tensor or a parameter is the embedding or the output layer."""
    return name.endswith((EMBEDDING, HEAD))


def other_towers(parameters: Mapping[str, Layout], reported: Iterable[str]) -> set[str]:
    """Return the engine's parameters that belong to other towers than the text model, of which no version has any.

    ``parameters``: those of the version. Without another tower all that an engine has must be sent.
    """
    sent = [tensor for each in parameters.values() for tensor in each.tensors]
    if not any(name.startswith((TEXT_TOWER, INSIDE)) for name in sent):
        return set()
    roots = {name.partition(".")[0] for name in (*parameters, HEAD)}
    return {name for name in reported if name.partition(".")[0] not in roots}


def transposed(data: Buffer, matrix: Matrix) -> Buffer:
    """Return the bytes of matrices, end to end, each transposed."""
    rows, columns, item_bytes = matrix
    table = np.frombuffer(data, dtype=np.uint8).reshape(-1, rows, columns, item_bytes)
    return np.ascontiguousarray(table.swapaxes(1, 2)).reshape(-1).data


def source_of(name: str) -> str:
    """Return the parameter from which SGLang makes one that no checkpoint has; ``name`` itself where it has been sent."""
    return f"{name.removesuffix(_DERIVED)}weight" if name.endswith(f".{_DERIVED}") else name


def _place(name: str, names: Collection[str]) -> tuple[str, tuple[int, ...]]:
    """Return the engine's parameter that a checkpoint tensor is part of, and its position in it. ``names``: of all."""
    if name.startswith(INSIDE):
        name = name.replace(TEXT_TOWER, "", 1)
    if (match := _ATTENTION.fullmatch(name)) and f"{match['prefix']}.kv_a_proj_with_mqa.weight" not in names:
        return f"{match['prefix']}.qkv_proj.{match['kind']}", ("qkv".index(match["part"]),)
    if match := _EXPERT.fullmatch(name):
        expert = int(match["expert"])
        if match["part"] in _W13:
            return f"{match['prefix']}.w13_weight", (expert, _W13.index(match["part"]) % 2)
        return f"{match['prefix']}.w2_weight", (expert, 0)
    if (match := _LATENT.fullmatch(name)) and f"{match['prefix']}.q_a_proj.weight" in names:
        return f"{match['prefix']}.fused_qkv_a_proj_with_mqa.weight", (int(match["part"] != "q_a_proj"),)
    if match := _MLP.fullmatch(name):
        return f"{match['prefix']}.gate_up_proj.{match['kind']}", (("gate", "up").index(match["part"]),)
    if match := _LINEAR.fullmatch(name):
        merged, place = _MERGED_LINEAR[match["part"]]
        return f"{match['prefix']}{merged}.weight", (place,)
    ending = next((ending for ending in _STACKED if name.endswith(ending)), None)
    return (name if ending is None else name.removesuffix(ending) + _STACKED[ending]), _WHOLE


def _pads_vocabulary(names: Collection[str]) -> bool:
    """Return whether the class pads its embedding. Gemma 3's does not; no other has both of these norms."""
    before, heads = "pre_feedforward_layernorm", "self_attn.q_norm"
    return not any(name.replace(before, heads) in names for name in names if before in name)


def _layout(name: str, places: Mapping[tuple[int, ...], int], tensors: Sequence[Described], *, padded: bool) -> Layout:
    indices = [places[place] for place in sorted(places)]
    return Layout(
        name=name,
        tensors=[tensors[index][0] for index in indices],
        indices=indices,
        padding_bytes=_vocab_padding(tensors[indices[0]]) if padded and is_vocabulary(name) else 0,
        complete=set(places) == _expected_places(name, places),
        matrix=_matrix(tensors[indices[0]]),
    )


def _matrix(tensor: Described) -> Matrix | None:
    name, shape, num_bytes = tensor
    if not name.endswith(_TRANSPOSED) or len(shape) < 2 or not num_bytes:
        return None
    return shape[-2], shape[-1], num_bytes // prod(shape)


def _expected_places(name: str, places: Collection[tuple[int, ...]]) -> set[tuple[int, ...]]:
    if _WHOLE in places:
        return {_WHOLE}
    experts = range(max(place[0] for place in places) + 1)
    if name.endswith(".w13_weight"):
        return {(expert, part) for expert in experts for part in range(2)}
    if name.endswith(".w2_weight"):
        return {(expert, 0) for expert in experts}
    if ".qkv_proj." in name:
        return {(0,), (1,), (2,)}
    return {(0,), (1,)}


def _vocab_padding(tensor: Described) -> int:
    _, shape, num_bytes = tensor
    return -shape[0] % VOCAB_ROWS * (num_bytes // shape[0]) if shape and shape[0] else 0


def checksums_of(parameters: Mapping[str, Parameter], checksum: Checksum) -> dict[str, str]:
    """Return the checksum of each complete parameter; ``checksum`` is the engine's hash."""
    complete = [parameter for parameter in parameters.values() if parameter.complete]
    # The hashes release the interpreter lock; a large model needs all cores.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = list(pool.map(lambda parameter: checksum(parameter.parts), complete))
    return {parameter.name: digest for parameter, digest in zip(complete, digests, strict=True)}
