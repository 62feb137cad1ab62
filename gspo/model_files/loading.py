"""A model of transformers whose weights are read straight from its files, each process reading only what it keeps.

``from_pretrained`` reads everything in every process. It also gives random values to weights that the files lack, with
nothing but a warning. Here that is an error, as is every other mistake in the files, before memory is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from gspo.model_files.file_names import file_name, keep_names, load_config
from gspo.model_files.folder import DTYPES, ModelFilesError, ModelFolder, StoredTensor
from gspo.model_files.sources import WantedTensor, sources_of

_LAYER: Final = re.compile(r".*?\blayers\.\d+\.")
_DERIVED: Final = ("rotary_emb.inv_freq", ".bias_mask", ".masked_bias")
"""Ends of names of what old files hold although it follows from config.json."""


@dataclass(frozen=True)
class OwnRange:
    """The elements of one parameter that this process keeps."""

    target: Tensor
    """Their memory: one contiguous dimension."""
    start: int
    """The place of the first in the flattened parameter."""


class WeightPlaces(Protocol):
    """Where the weights of a model go that several processes may load together."""

    def building(self) -> AbstractContextManager[Any]:
        """Inside, modules are made with the memory that they keep."""

    def converting(self) -> AbstractContextManager[Any]:
        """Inside, transformers loads a model itself, which ``load_from_files`` cannot."""

    def own_range(self, parameter: nn.Parameter) -> OwnRange:
        """Return the range of a parameter that this process keeps."""

    def agree(self, error: ModelFilesError | None) -> None:
        """Raises: ModelFilesError in every process when one has met with an error. Collective."""


class _WholeModel:
    """Everything, in this process alone."""

    def building(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def converting(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def own_range(self, parameter: nn.Parameter) -> OwnRange:
        return OwnRange(parameter.detach().view(-1), 0)

    def agree(self, error: ModelFilesError | None) -> None:
        if error is not None:
            raise error


WHOLE_MODEL: Final[WeightPlaces] = _WholeModel()


def load_from_files(model_dir: Path, dtype: torch.dtype, *, attention: str, placement: WeightPlaces = WHOLE_MODEL) -> Any:
    """Load a causal language model. None when its class converts weights in ways that only transformers itself knows.

    Collective where ``placement`` is.
    Raises: ModelFilesError when the files do not hold the model of config.json; other ValueErrors of transformers.
    """
    from transformers import AutoModelForCausalLM

    config, text = load_config(model_dir)
    with torch.device("meta"):
        # Also imports the model's classes: those imported inside DeepSpeed's zero.Init would stay without initialiser.
        bare = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    keep_names(bare, text)
    wanted = None if bare._keep_in_fp32_modules_strict else _wanted(bare, sources_of)
    if wanted is None:
        if text.names:
            raise ModelFilesError(
                f"{model_dir}: {type(bare).__name__} is read by transformers alone, which would read the other towers, too; "
                "use another model"
            )
        # transformers would give random values to what the files lack, and take no notice of what they have besides.
        _agreed(model_dir, _wanted(bare, _converted) or {}, placement)
        return None
    folder, found = _agreed(model_dir, wanted, placement)
    with folder:
        model = _build(type(bare), config, dtype, attention, placement)
        keep_names(model, text)
        failure: ModelFilesError | None = None
        try:
            _fill(model, folder, found, placement)
        except ModelFilesError as error:
            failure = error
        placement.agree(failure)
    _set_generation(model, model_dir)
    return model.eval()


def load_converted(model_dir: Path, dtype: torch.dtype, *, attention: str, placement: WeightPlaces = WHOLE_MODEL) -> Any:
    """Have transformers load what ``load_from_files`` looked through and cannot load. Collective where ``placement`` is."""
    from transformers import AutoModelForCausalLM

    with placement.converting():
        return AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=load_config(model_dir)[0],
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
        )


def _require_all_read(model_dir: Path, wanted: Collection[str], unread: Iterable[str]) -> None:
    """Raises: ModelFilesError when files have more of a layer than is read.

    Other layers may be there, which predict further tokens, and parts beside the decoder.
    """
    layers = {found[0] for name in wanted if (found := _LAYER.match(name))}
    beside = sorted(
        name for name in unread if (found := _LAYER.match(name)) and found[0] in layers and not name.endswith(_DERIVED)
    )
    if beside:
        raise ModelFilesError(
            f"{model_dir} has {beside[0]}, for which config.json has no place ({len(beside)} such tensors): the weights "
            "belong to another model; copy or download the model again"
        )


def _agreed(
    model_dir: Path, wanted: Mapping[str, list[list[WantedTensor]]], placement: WeightPlaces
) -> tuple[ModelFolder, dict[str, list[StoredTensor]]]:
    """Return the open folder and each parameter's sources; on failure all processes raise the same error."""
    failure: ModelFilesError | None = None
    try:
        folder = ModelFolder(model_dir)
        found = {name: _find(folder, choices) for name, choices in wanted.items()}
        read = {stored.name for each in found.values() for stored in each}
        _require_all_read(model_dir, read, folder.tensors.keys() - read)
    except ModelFilesError as error:
        failure = error
    placement.agree(failure)
    return folder, found


def _converted(model: Any, name: str, shape: Sequence[int]) -> list[WantedTensor]:
    """The tensors of which transformers makes a parameter, in whatever way."""
    from transformers.core_model_loading import revert_weight_conversion

    stored = revert_weight_conversion(model, {name: torch.empty(tuple(shape), device="meta")})
    return [WantedTensor(each, tuple(tensor.shape)) for each, tensor in stored.items()]


def _wanted(bare: nn.Module, find: Callable[..., list[WantedTensor] | None]) -> dict[str, list[list[WantedTensor]]] | None:
    """By the name of each parameter and saved buffer, the sets of tensors of which one must be in the files."""
    aliases: dict[int, list[str]] = {}
    values: dict[str, Tensor] = {}
    for name, value in bare.state_dict(keep_vars=True).items():
        aliases.setdefault(id(value), []).append(name)
        values[name] = value
    wanted: dict[str, list[list[WantedTensor]]] = {}
    for names in aliases.values():
        choices: list[list[WantedTensor]] = []
        for name in names:
            sources = find(bare, name, values[name].shape)
            if sources is None:
                return None
            choices.append(sources)
            if len(sources) > 1:
                # Files of newer models hold it fused.
                choices.append([WantedTensor(file_name(bare, name), tuple(values[name].shape))])
        # Tied weights are in the files under any of their names.
        wanted |= dict.fromkeys(names, choices)
    return wanted


def _find(folder: ModelFolder, choices: Sequence[Sequence[WantedTensor]]) -> list[StoredTensor]:
    chosen = next((each for each in choices if all(source.name in folder.tensors for source in each)), None)
    if chosen is None:
        absent = next(source.name for source in choices[0] if source.name not in folder.tensors)
        raise ModelFilesError(
            f"{folder.directory} has no {absent}, which config.json asks for: the weights belong to another model or are "
            "incomplete; copy or download the model again"
        )
    found = []
    for source in chosen:
        stored = folder.tensors[source.name]
        if stored.shape != source.shape:
            raise ModelFilesError(
                f"{stored.path}: {stored.name} is {list(stored.shape)}, config.json asks for {list(source.shape)}: they are "
                "of different models; copy or download the model again"
            )
        if stored.dtype not in DTYPES:
            raise ModelFilesError(
                f"{stored.path}: {stored.name} is stored as {stored.dtype[:50]}, which cannot be trained; give the model in "
                f"one of {', '.join(DTYPES)}"
            )
        found.append(stored)
    return found


def _build(model_class: Any, config: Any, dtype: torch.dtype, attention: str, placement: WeightPlaces) -> Any:
    """Build the model with uninitialised memory."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), placement.building():
        model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    return model


@torch.no_grad()
def _fill(
    model: nn.Module, folder: ModelFolder, found: Mapping[str, Sequence[StoredTensor]], placement: WeightPlaces
) -> None:
    visited: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in visited:
            continue
        visited.add(id(value))
        own = placement.own_range(value) if isinstance(value, nn.Parameter) else OwnRange(value.view(-1), 0)
        for stored, begin, target in _pieces(own, found[name]):
            folder.read(stored, begin, target)


def _pieces(own: OwnRange, tensors: Sequence[StoredTensor]) -> Iterator[tuple[StoredTensor, int, Tensor]]:
    """Yield the parts of a range in each of the parameter's tensors: where there, and where to."""
    at, end = 0, own.start + own.target.numel()
    for stored in tensors:
        low, high = max(own.start, at), min(end, at + stored.num_elements)
        if low < high:
            yield stored, low - at, own.target[low - own.start : high - own.start]
        at += stored.num_elements


def _set_generation(model: Any, model_dir: Path) -> None:
    """Set the folder's generation_config.json, which an export copies."""
    from transformers import GenerationConfig

    if (model_dir / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
