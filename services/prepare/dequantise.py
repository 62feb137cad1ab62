"""``gspo model dequantise DIR NEW``: writes a quantised checkpoint in bfloat16, a tensor at a time.

    block FP8 (DeepSeek-V3, MiniMax-M2, Qwen3)   X.weight [R, C] float8, X.weight_scale_inv [R / rows, C / columns] of blocks
    MXFP4 (gpt-oss)                              X_blocks [E, R, C / 32, 16] with two numbers a byte, X_scales [E, R, C / 32]
    INT4 of compressed-tensors (Kimi K2)         X.weight_packed [R, C / 8], X.weight_scale [R, C / group], X.weight_shape

Numbers are multiplied in float32 and rounded once. MXFP4 is transformers' own conversion.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gspo.files import make_partial_directory, publish_directory
from gspo.model_files.folder import ModelFolder
from gspo_services.learner.export import ShardWriter, copy_companions
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.runtime.plain_text import indented_lines

Read = Callable[[str], Tensor]
_PLAIN: Final = ("F64", "F32", "F16", "BF16")


def main() -> int:
    """Parse the command line, and write. Returns the exit status."""
    begin_command()
    parser = argparse.ArgumentParser(
        prog="gspo model dequantise",
        description="Write a checkpoint whose weights are quantised (block FP8, MXFP4, INT4 of compressed-tensors) in "
        "bfloat16, as it is trained. Needs the room of the new files; a tensor at a time is in memory.",
    )
    parser.add_argument("source", type=Path, metavar="DIR", help="the quantised model")
    parser.add_argument("destination", type=Path, metavar="NEW", help="a directory that is not there yet")
    arguments = parser.parse_args()
    try:
        dequantise(arguments.source, arguments.destination)
    except (ValueError, OSError, SafetensorError) as error:
        sys.stderr.write(indented_lines(f"gspo model dequantise: {error}") + "\n")
        return 2
    sys.stdout.write(f"{arguments.destination}: bfloat16\n")
    return 0


def dequantise(source: Path, destination: Path) -> None:
    """Write the whole directory, or nothing. Raises: ValueError that names what is not known how to be read; OSError."""
    if destination.exists():
        raise ValueError(f"{destination} is there already: name another directory, or remove it")
    config = json.loads((source / "config.json").read_bytes())
    quantised = config.pop("quantization_config", None)
    if not isinstance(quantised, Mapping):
        raise ValueError(f"{source / 'config.json'} has no quantization_config: its weights are not quantised")
    partial = make_partial_directory(destination)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        folder = stack.enter_context(ModelFolder(source))
        paths = sorted({stored.path for stored in folder.tensors.values()})
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
        writer = ShardWriter(partial, 2 << 30)
        for name, value in _plain(folder, quantised, lambda name: files[folder.tensors[name].path].get_tensor(name)):
            writer.add(name, value)
        writer.finish()
        config.pop("torch_dtype", None)
        (partial / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2), encoding="utf-8")
        copy_companions(source, partial)
        publish_directory(partial, destination)


def _plain(folder: ModelFolder, quantised: Mapping[str, Any], read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, in the order of their names. Raises: ValueError."""
    forms = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _int4}
    method = str(quantised.get("quant_method"))
    if method not in forms:
        raise ValueError(f"quant_method is {method[:50]}, and {', '.join(forms)} are known: take the unquantised model")
    form, taken = forms[method], set[str]()
    for name in sorted(folder.tensors):
        if found := form(name, folder, quantised, read):
            taken |= found[2]
            yield found[0], found[1]
    for name in sorted(folder.tensors.keys() - taken):
        stored = folder.tensors[name]
        if stored.dtype not in _PLAIN:
            raise ValueError(f"{name} is {stored.dtype}, in no form of {method} that is known: take the unquantised model")
        yield name, read(name) if name.endswith("e_score_correction_bias") else read(name).to(torch.bfloat16)


_Found = tuple[str, Tensor, set[str]] | None
"""A tensor's name and value, and the stored ones that make it."""


def _fp8(name: str, folder: ModelFolder, quantised: Mapping[str, Any], read: Read) -> _Found:
    scale = f"{name}_scale_inv"
    if not name.endswith(".weight") or scale not in folder.tensors:
        return None
    rows, columns = quantised.get("weight_block_size") or (128, 128)
    (height, width), blocks = folder.tensors[name].shape, folder.tensors[scale].shape
    if blocks != (-(-height // rows), -(-width // columns)):
        raise ValueError(f"{scale} is {list(blocks)}, {name} {[height, width]}, and weight_block_size {[rows, columns]}")
    each = read(scale).float().repeat_interleave(rows, 0)[:height].repeat_interleave(columns, 1)[:, :width]
    return name, (read(name).float() * each).to(torch.bfloat16), {name, scale}


def _mxfp4(name: str, folder: ModelFolder, quantised: Mapping[str, Any], read: Read) -> _Found:
    own = name.removesuffix("_blocks")
    scales = f"{own}_scales"
    if own == name or scales not in folder.tensors:
        return None
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return own, convert_moe_packed_tensors(read(name), read(scales)).contiguous(), {name, scales}


def _int4(name: str, folder: ModelFolder, quantised: Mapping[str, Any], read: Read) -> _Found:
    own = name.removesuffix("_packed")
    parts = {name, f"{own}_scale", f"{own}_shape"}
    if own == name or not parts <= folder.tensors.keys():
        return None
    kinds = [each.get("weights") or {} for each in (quantised.get("config_groups") or {}).values()]
    if quantised.get("format") != "pack-quantized" or any(
        (each.get("num_bits"), each.get("symmetric"), each.get("type", "int")) != (4, True, "int") for each in kinds
    ):
        raise ValueError(
            f"format {quantised.get('format')}: symmetric INT4 in pack-quantized is known: take the unquantised model"
        )
    height, width = (int(size) for size in read(f"{own}_shape"))
    digits = (read(name)[:, :, None] >> (4 * torch.arange(8, dtype=torch.int32))) & 15
    values = digits.reshape(height, -1)[:, :width].float() - 8
    scale = read(f"{own}_scale").float()
    if width % scale.shape[1]:
        raise ValueError(f"{own}_scale is {list(scale.shape)}, which does not divide the {width} columns")
    return own, (values * scale.repeat_interleave(width // scale.shape[1], 1)).to(torch.bfloat16), parts


if __name__ == "__main__":
    sys.exit(main())
