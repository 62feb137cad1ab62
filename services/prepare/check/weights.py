"""A model's files held against its config.json, by the headers alone: whole files, all experts, as many elements."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from gspo.model_files.configuration import read_whole
from gspo.model_files.text_model import text_model_of
from gspo.moe.mixture import mixture_of
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import ReadModel, Situation

TRIED: Final = frozenset(
    {
        "deepseek_v3", "gemma3_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "minimax_m2", "mistral",
        "mixtral", "olmoe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    }
)  # fmt: skip
"""Families whose weights were compared with a real engine's, bit by bit. The number of their parameters is known exactly."""
MOST_HEADER_BYTES: Final = 100 * 2**20
TYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LAYER: Final = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")
_BESIDE: Final = re.compile(r"mtp\..*|.*\.(?:e_score_correction_bias|inv_freq)")
"""What is no parameter of the decoder: layers that predict further tokens, and buffers."""
_OTHERS: Final = "config.json and weights are of different models, or a file is missing: download the model again"


@dataclass
class _Headers:
    """What the files of the weights say of themselves."""

    shapes: dict[str, list[int]] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    """Files that the index names."""
    broken: list[str] = field(default_factory=list)


def weight_findings(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    """Whether the files are there and whole, and hold the model of config.json."""
    path = situation.model_path
    found = _headers(path)
    if found is None:
        text, way_out = f"{path} has no weights (*.safetensors).", "download them, or save the model with save_pretrained"
        if pickles := sorted(each.name for kind in ("*.bin", "*.pt", "*.pth") for each in path.glob(kind)):
            text = f"{path} has its weights in {pickles[0]}, and no *.safetensors: pickles are not read."
            load = f"m.AutoModelForCausalLM.from_pretrained('{path}', dtype='auto')"
            way_out = f"`python -c \"import transformers as m; {load}.save_pretrained('{path}')\"` converts them"
        yield situation.missing("weights", text, way_out)
        return
    for names, what in (
        (found.missing, "named by the index and not there"),
        (found.broken, "cut off, or no safetensors file"),
    ):
        if names:
            yield Finding(
                check="weights",
                status="fail",
                text=f"{path}: {', '.join(names[:3])}: {what}",
                way_out="download the model again",
            )
            return
    types = ", ".join(sorted(TYPES.get(name, name) for name in found.types))
    text = f"{sum(map(prod, found.shapes.values())):,} elements, {types}"
    # Of a checkpoint that also takes images, config.json was read as its text model's.
    text_model = text_model_of(read_whole(path))
    objection = _objection(model, {name: size for name, size in found.shapes.items() if text_model.owns(name)})
    if objection:
        yield Finding(check="weights", status="fail", text=f"{text}; {objection}", way_out=_OTHERS)
        return
    yield Finding(check="weights", status="ok", text=text)


def _objection(model: ReadModel, shapes: Mapping[str, list[int]]) -> str:
    """What the files have too much or too little of; empty: nothing is known to be wrong."""
    shape = model.shape
    if shape is None:
        return ""
    layers: dict[int, dict[str, list[int]]] = {}
    for name, size in shapes.items():
        if found := _LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), {})[found[2]] = size
    if layers:
        absent = next((layer for layer in range(shape.layers) if layer not in layers), None)
        if absent is not None:
            return f"nothing of layer {absent}, and config.json describes {shape.layers} layers"
    dense, experts = mixture_of(model.config).dense_layers, shape.experts
    for layer, names in sorted(layers.items()):
        if layer < shape.layers and (odd := _experts(names, 0 if layer in dense else experts)):
            return f"layer {layer} has {odd}"
    if shape.model_type not in TRIED:
        return ""
    beyond = {name for name in shapes if (found := _LAYER.fullmatch(name)) and int(found[1]) >= shape.layers}
    counted = sum(prod(size) for name, size in shapes.items() if name not in beyond and not _BESIDE.fullmatch(name))
    # A tied head may be stored as well.
    if counted in (shape.parameters, shape.parameters + shape.vocabulary * shape.hidden):
        return ""
    return f"config.json describes {shape.parameters:,}, the files {counted:,}{_odd_one(layers, dense, shape.layers)}"


def _experts(names: Mapping[str, list[int]], experts: int) -> str:
    """What is wrong with a layer's experts: a list of them by number, or one stacked tensor."""
    numbers: dict[str, set[int]] = {}
    stacked: list[str] = []
    for name, size in names.items():
        if found := _EXPERT.fullmatch(name):
            numbers.setdefault(f"{found[1]}.*.{found[3]}", set()).add(int(found[2]))
        elif re.search(r"\bexperts\.", name) and "shared" not in name:
            stacked.append(name)
            if size[:1] != [experts]:
                return f"{name} {size}, and config.json describes {experts} experts"
    if numbers and stacked:
        return f"experts both apart ({min(numbers)}) and stacked ({stacked[0]})"
    for name, there in sorted(numbers.items()):
        for what, odd in (("no", set(range(experts)) - there), ("", there - set(range(experts)))):
            if odd:
                number = name.replace(".*.", f".{min(odd)}.")
                return f"{what} {number}".strip() + f", and config.json describes {experts} experts"
    return ""


def _odd_one(layers: Mapping[int, Mapping[str, list[int]]], dense: frozenset[int], number: int) -> str:
    """A tensor that not all layers have that are alike."""
    for alike in (dense, frozenset(range(number)) - dense):
        counts = Counter(name for layer in alike for name in layers.get(layer, ()))
        for name, count in counts.items():
            if count < len(alike):
                there = {layer for layer in alike if name in layers[layer]}
                return f": layer {min(there)} has {name}, and layer {min(alike - there)} has not"
    return ""


def _headers(path: Path) -> _Headers | None:
    """None: no weights."""
    index = path / "model.safetensors.index.json"
    names = {file.name for file in path.glob("*.safetensors")}
    listed: set[str] = set()
    if index.is_file():
        try:
            listed = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return _Headers(broken=[index.name])
    if not names and not listed:
        return None
    found = _Headers(missing=sorted(listed - names))
    for name in sorted((names & listed) if listed else names):
        header = _header(path / name)
        if header is None:
            found.broken.append(name)
            continue
        found.shapes |= {tensor: entry["shape"] for tensor, entry in header.items()}
        found.types |= {str(entry["dtype"]) for entry in header.values()}
    return found


def _header(path: Path) -> dict[str, dict[str, Any]] | None:
    """The tensors of a safetensors file; None when it is not whole.

    Eight bytes give the length of the header, which is JSON; the end of the last tensor gives the length of the file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
        whole = path.stat().st_size == 8 + length + end
        return tensors if whole and all(_is_shape(tensor["shape"]) for tensor in tensors.values()) else None
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and size >= 0 for size in value)
