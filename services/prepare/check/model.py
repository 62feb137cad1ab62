"""Checks of the model's directory that need no tokenizer: architecture, weights, ranks, positions."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from gspo.model_files.configuration import read_config, require_unquantised
from gspo.model_files.text_model import TOWER_CLASSES, is_tower
from gspo.moe.mixture import mixture_of
from gspo_services.learner.start import (
    TRAINED_LAYERS,
    parallelism_of,
    position_limit,
    require_adaptable,
    require_apart,
    require_sequence_parallel,
    require_supported,
)
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import ReadModel, Situation
from gspo_services.prepare.check.weights import TRIED, weight_findings
from gspo_services.shared.estimates import ShapeError, shape_of, trained_parameters
from gspo_services.shared.runtime.paths import way_to_model
from gspo_services.shared.settings import Scheduled, critical_batches
from gspo_services.shared.weights import ServedError, require_servable

OTHER_MODEL: Final = "use a model whose class ends in ForCausalLM: docs/guide/learner.md has a table of families"


def read_model(situation: Situation) -> tuple[ReadModel, list[Finding]]:
    """config.json and the shape in it, with what is wrong with either."""
    path = situation.model_path
    if not (path / "config.json").is_file():
        way_out = f"name the directory of a Hugging Face model in model.path; {way_to_model(path)}"
        found = situation.missing("model", f"model.path is {path}: no config.json there.", way_out)
        if situation.elsewhere:
            found = Finding(
                check="model", status="warn", text=f"model.path is {path}: no config.json there; nothing of it is checked",
                way_out="--model DIR names a directory with the model's config.json, and perhaps its tokenizer",
            )  # fmt: skip
        return ReadModel(config={}, shape=None), [found]
    try:
        config = read_config(path)
    except (ValueError, RecursionError) as error:
        broken = Finding(check="model", status="fail", text=str(error), way_out="download or save the model again")
        return ReadModel(config={}, shape=None), [broken]
    try:
        return ReadModel(config=config, shape=shape_of(config)), []
    except ShapeError as error:
        text, _, way_out = str(error).partition("; ")
        unknown = Finding(
            check="model", status="warn", text=f"{path / 'config.json'}: {text}: memory and speed are not estimated",
            way_out=way_out or "check that it is a decoder's; its keys are those of Llama, Qwen, Mistral and Mixtral",
        )  # fmt: skip
        return ReadModel(config=config, shape=None), [unknown]


def model_findings(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    """Everything about a model that has a config.json."""
    if not model.config:
        return
    yield _architecture(situation, model)
    if _is_readable(model.config):
        yield from _ranks(situation, model)
    yield from _adapters(situation, model)
    yield from weight_findings(situation, model)
    yield from _positions(situation, model)


def _architecture(situation: Situation, model: ReadModel) -> Finding:
    config = model.config
    kind = str(config.get("model_type", ""))[:100]
    names = _texts(config, "architectures")
    refused = learner_refusal(config) or _unserved(situation, config)
    if refused:
        label = names[0] if names else kind or "the model"
        return Finding(check="architecture", status="fail", text=f"{label}: {refused[0]}", way_out=refused[1])
    for name in names[:1]:
        lacking = [library for library in ("transformers", "sglang") if has_class(library, kind, name) is False]
        if lacking:
            return Finding(
                check="architecture", status="fail",
                text=f"{name}: no class of the {' and '.join(lacking)} installed here{_own_code(config)}",
                way_out="train a model that both know, or install a release that does",
            )  # fmt: skip
    tower = ", its text model alone (images in a task are refused)" if is_tower(config) else ""
    text = f"{names[0] if names else kind}{tower}, {_size(model)}"
    if kind in TRIED:
        return Finding(check="architecture", status="ok", text=text + _own_code(config))
    return Finding(
        check="architecture", status="warn",
        text=f"{text}{_own_code(config)}; only {', '.join(sorted(TRIED))} were served and compared bit by bit here",
        way_out="try one batch: an engine that holds other weights than were sent says so at the first update",
    )  # fmt: skip


def _is_readable(config: Mapping[str, Any]) -> bool:
    """Whether its experts can be read; where not, ``learner_refusal`` has said why."""
    try:
        mixture_of(config)
    except ValueError:
        return False
    return True


def _own_code(config: Mapping[str, Any]) -> str:
    return "; its own code (auto_map) is never executed" if config.get("auto_map") else ""


def learner_refusal(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the learner would refuse the model, and the way out."""
    names = _texts(config, "architectures")
    text = config.get("text_config")
    in_chunks = ["chunked_attention"] if isinstance(text, Mapping) and text.get("attention_chunk_size") else []
    others = sorted({*_texts(config, "layer_types"), *in_chunks} - TRAINED_LAYERS)
    if others:
        return (
            f"layers of type {', '.join(others)}",
            f"use a model whose layers are {', '.join(sorted(TRAINED_LAYERS))}: docs/guide/learner.md has a table",
        )
    try:
        require_unquantised(config)
        mixture_of(config)
        require_apart(config)
    except ValueError as error:
        text, _, way_out = str(error).partition("; ")
        return text, way_out
    if config.get("num_kv_shared_layers"):
        return "layers that take their keys from others (num_kv_shared_layers)", "use another model"
    if config.get("router_jitter_noise"):
        return f"router_jitter_noise is {config['router_jitter_noise']}", "set it to 0 in config.json"
    if names and not names[0].endswith("ForCausalLM") and not is_tower(config):
        for kind, says in (("vision_config", "images"), ("audio_config", "sound")):
            if kind in config:
                known = ", ".join(sorted(TOWER_CLASSES))
                return (
                    f"{names[0]} takes {says}",
                    f"use a model of text alone, or one whose text model is trained here: {known}",
                )
        if names[0].endswith("LMHeadModel"):
            return f"{names[0]} predates the decoders with rotary positions that are trained here", OTHER_MODEL
        return f"{names[0]} is not a causal language model", OTHER_MODEL
    return None


def _unserved(situation: Situation, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why a rollout would refuse the model, and the way out."""
    settings = situation.settings
    here = not settings.rollout.server_url and not situation.elsewhere
    on_gpu = situation.hardware.device is not None
    is_known = here and (on_gpu or not situation.has_unknown_hardware)
    try:
        require_servable(config, settings, device=("cuda" if on_gpu else "cpu") if is_known else None)
    except ServedError as error:
        text, _, way_out = str(error).rpartition("; ")
        return text, way_out
    return None


def _texts(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of names; empty for anything else."""
    value = config.get(key)
    return [str(name)[:100] for name in value] if isinstance(value, list) else []


@cache
def has_class(library: str, kind: str, name: str) -> bool | None:
    """Whether an installed library has the model's class, found in its sources; None when it is not installed.

    Nothing is imported: that would take seconds.
    """
    found = importlib.util.find_spec(library)
    if found is None or not found.submodule_search_locations or not re.fullmatch(r"\w+", kind):
        return None
    root = Path(found.submodule_search_locations[0])
    definition = f"class {name}(".encode()
    if library != "transformers":
        # Some have a configuration that hands them to another class, as OLMo 3 to that of OLMo 2.
        known = ((root / "srt" / "models", definition), (root / "srt" / "configs", f'"{name}" in'.encode()))
        return any(text in path.read_bytes() for folder, text in known for path in sorted(folder.glob("*.py")))
    # A text model has the folder of the whole: gemma3_text is in that of gemma3.
    files = [*(root / "models" / kind).glob("*.py"), *(root / "models").glob("*/modeling_*.py")]
    return any(definition in path.read_bytes() for path in files)


def _size(model: ReadModel) -> str:
    shape = model.shape
    if shape is None:
        return "of unknown size"
    parameters = count(shape.parameters)
    if shape.experts:
        active = count(shape.active_parameters)
        return f"{parameters} parameters, {active} active; {shape.experts} experts, {shape.layers} layers"
    return f"{parameters} parameters, {shape.layers} layers"


def count(number: float) -> str:
    """A number of parameters or tokens in words."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"


def _ranks(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    settings = situation.settings
    learner = settings.learner
    try:
        plan = parallelism_of(
            model.config,
            num_ranks=situation.num_ranks,
            expert_parallel=learner.expert_parallel,
            routing_replay=settings.objective.routing_replay,
            load_balance=settings.objective.load_balance_coefficient > 0,
            scales_routers=learner.router_rate_factor != 1,
            moves_biases=settings.objective.expert_bias_rate > 0,
        )
        require_supported(plan)
        require_adaptable(model.config, settings.lora, learner, moves_biases=plan.moves_biases)
        require_sequence_parallel(
            model.config, learner.sequence_parallel, num_ranks=plan.num_ranks, load_balance=plan.load_balance
        )
    except (ValueError, TypeError) as error:
        text, _, way_out = str(error).partition(";")
        yield Finding(
            check="ranks",
            status="fail",
            text=text,
            way_out=way_out.strip() or 'see docs/guide/learner.md, "What goes together"',
        )
        return
    share = f", experts over {learner.expert_parallel}" if learner.expert_parallel > 1 else ""
    if learner.sequence_parallel > 1:
        share += f", sequences over {learner.sequence_parallel}"
    yield Finding(
        check="ranks", status="ok", text=f"{situation.num_ranks}, ZeRO {learner.zero_stage}{share}, {learner.dtype}"
    )


def _adapters(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    """What is trained of the model, where it is not all of it."""
    settings = situation.settings
    if not settings.lora.is_used or model.shape is None:
        return
    lora = settings.lora
    trained = trained_parameters(model.shape, settings)
    merges = settings.lora.publish == "merged" and settings.model.dtype == "bfloat16"
    several = f"{', '.join(lora.adapters)}, each of " if lora.adapters else ""
    text = f"{several}rank {lora.rank} on {', '.join(lora.target_modules)}: {count(trained)} parameters are trained"
    if settings.lora.publish == "adapter":
        text += f"; a version has these alone, in {settings.model.dtype}, and every server has the model below"
    elif merges:
        text += "; engines get the sum of weights and adapters rounded to bfloat16 (docs/guide/lora.md)"
    yield Finding(check="adapters", status="note" if merges else "ok", text=text)


def _positions(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    settings = situation.settings
    wanted, served = settings.largest_sampling.max_tokens, model.config.get("max_position_embeddings")
    limit = position_limit(model.config)
    if limit is None or not isinstance(served, int) or wanted <= served:
        return
    too_long = (at for at in critical_batches(settings) if Scheduled.of(settings, at).max_tokens > served)
    where = "" if settings.schedule.max_tokens is None else f" (schedule.max_tokens, above that from batch {next(too_long)})"
    name = "sampling" if not where else "schedule"
    if wanted > limit:
        yield Finding(
            check="positions", status="fail",
            text=f"sampling.max_tokens is {wanted}{where}; the model has {limit} positions: the learner does not start",
            way_out=f"lower {name}.max_tokens to at most {limit}, or take a model with more positions",
        )  # fmt: skip
        return
    yield Finding(
        check="positions", status="warn",
        text=f"sampling.max_tokens is {wanted}{where}; the engine ends a sequence at the model's {served} positions",
        way_out=f"lower {name}.max_tokens to at most {served}, or raise max_position_embeddings in config.json to {limit}",
    )  # fmt: skip
