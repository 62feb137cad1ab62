"""Whether what the run holds fits into the memory of its GPUs, or of its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from gspo_services.learner.start import require_sequence_parallel
from gspo_services.prepare.check.findings import Finding, verdict
from gspo_services.prepare.check.situation import ReadModel, Situation
from gspo_services.shared.estimates import (
    KEPT_BY_ENGINE,
    Device,
    EngineMemory,
    LearnerMemory,
    Span,
    colocated_memory,
    engine_memory,
    gib,
    learner_host,
    learner_memory,
    memory_rows,
    memory_text,
    rollout_host,
)
from gspo_services.shared.settings import Settings
from gspo_services.shared.weights import SpreadError, require_spread, spread_of

LONG_TOKENS: Final = 16_384
"""A sequence from which on one sequence is a micro-batch."""
UNNAMED: Final = "--gpu NAME --gpus N compares it with a GPU"


def memory_findings(situation: Situation, model: ReadModel, prompt_tokens: float) -> Iterator[Finding]:
    """Learner, engine and host. Nothing for a model of unknown shape."""
    yield from _ranks_of_a_server(situation, model)
    if model.shape is None:
        return
    cuda = situation.hardware.device is not None or situation.has_unknown_hardware
    learner = _learner_memory(model, situation.settings, cuda=cuda)
    device = situation.hardware.device
    engine = engine_memory(model.shape, situation.settings, device.memory_bytes if device else None)
    if situation.has_unknown_hardware:
        yield _note("learner memory", f"{learner.total.gib} a rank ({_parts(learner)}); {UNNAMED}")
        cache = engine.cache_bytes_per_token / 1024
        yield _note("engine memory", f"{gib(engine.weights)} of weights, and {cache:.3g} KiB of cache a token; {UNNAMED}")
        yield _hosts(situation, model, learner)
    elif device is None:
        yield from _on_the_host(situation, model, learner, engine)
        yield from _cache(situation, engine, prompt_tokens)
    else:
        yield from _on_devices(situation, model, learner, engine)
        yield from _cache(situation, engine, prompt_tokens)
        yield _hosts(situation, model, learner)
    rows = memory_text(memory_rows(model.shape, situation.settings, cuda=cuda, teacher_parameters=model.teacher_parameters))
    yield Finding(check="memory of a rank", status="ok", text=rows, basis="estimated")


def _learner_memory(model: ReadModel, settings: Settings, *, cuda: bool) -> LearnerMemory:
    assert model.shape is not None
    return learner_memory(model.shape, settings, cuda=cuda, teacher_parameters=model.teacher_parameters)


def _note(check: str, text: str) -> Finding:
    return Finding(check=check, status="note", text=text, basis="estimated")


def _ranks_of_a_server(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    """How a server's ranks share the model, and whether its shards can be verified."""
    spread = spread_of(situation.settings)
    if spread.num_ranks == 1 or not model.config:
        return
    try:
        require_spread(model.config, spread)
    except (SpreadError, KeyError) as error:
        known = isinstance(error, SpreadError)
        text, _, way_out = str(error).rpartition("; ") if known else (f"config.json has no {error}", "", "")
        yield Finding(check="engine ranks", status="fail", text=text, way_out=way_out or "rollout.tensor_parallel = 1")
        return
    copies = f"{spread.data} copies of the model, each over {spread.tensor} ranks" if spread.data > 1 else ""
    text = copies or f"{spread.tensor} ranks share the model"
    text += f", in {spread.expert} groups with experts of their own" if spread.expert > 1 else ""
    yield Finding(check="engine ranks", status="ok", text=f"each server has {text}")


def _parts(learner: LearnerMemory) -> str:
    parts = {
        "weights": Span(learner.weights, learner.weights),
        "gradients": Span(learner.gradients, learner.gradients),
        "optimizer": Span(learner.optimizer, learner.optimizer),
        "reference": Span(learner.reference, learner.reference),
        "teacher": Span(learner.teacher, learner.teacher),
        "activations": learner.activations,
    }
    return ", ".join(f"{name} {span.gib}" for name, span in parts.items() if span.high > 0.005 * learner.total.high)


def _smaller(situation: Situation, model: ReadModel) -> str:
    """What makes a rank smaller, in the order in which it costs least."""
    learner = situation.settings.learner
    ways = []
    if not learner.activation_checkpointing:
        ways.append("learner.activation_checkpointing = true")
    if situation.num_ranks > 1 and learner.zero_stage < 3:
        ways.append("learner.zero_stage = 3")
    if learner.max_tokens_per_micro_batch > situation.settings.largest_sampling.max_tokens:
        ways.append(f"learner.max_tokens_per_micro_batch = {situation.settings.largest_sampling.max_tokens}")
    if learner.dtype == "float32":
        ways.append('learner.dtype = "bfloat16"')
    if situation.settings.largest_sampling.max_tokens >= max(LONG_TOKENS, learner.max_tokens_per_micro_batch):
        ways += _for_long_sequences(situation, model)
    ways.append("more ranks")
    if learner.offload == "none":
        ways.append('learner.offload = "optimizer"')
    return ", ".join(ways[:-1]) + f" or {ways[-1]}" if len(ways) > 1 else ways[0]


def _for_long_sequences(situation: Situation, model: ReadModel) -> Iterator[str]:
    """What makes a rank smaller whose micro-batch is one long sequence."""
    learner, is_dense = situation.settings.learner, model.shape is not None and not model.shape.experts
    if learner.mlp_tiles == 1 and is_dense:
        yield "learner.mlp_tiles = 8"
    if learner.sequence_parallel == 1 and situation.num_ranks > 1:
        with suppress(ValueError):
            require_sequence_parallel(
                model.config, situation.num_ranks, num_ranks=situation.num_ranks,
                load_balance=situation.settings.objective.load_balance_coefficient > 0,
            )  # fmt: skip
            yield f"learner.sequence_parallel = {situation.num_ranks}"
    if learner.activation_checkpointing and not learner.activation_offload:
        yield "learner.activation_offload = true"


def _on_devices(situation: Situation, model: ReadModel, learner: LearnerMemory, engine: EngineMemory) -> Iterator[Finding]:
    hardware = situation.hardware
    device = hardware.device
    assert device is not None
    assert model.shape is not None
    room, ranks = device.memory_bytes, situation.num_ranks
    if ranks > hardware.num_devices:
        yield Finding(
            check="GPUs", status="fail",
            text=f"{ranks} ranks of the learner need as many GPUs; there are {hardware.num_devices}",
            way_out="lower learner.num_ranks, or name more with --gpus",
        )  # fmt: skip
    if situation.settings.run.colocate:
        yield from _turn_findings(learner, engine, device, _parts(learner), _smaller(situation, model))
        return
    text = f"{learner.total.gib} a rank ({_parts(learner)}); a {device.name} has {gib(room)}"
    yield verdict("learner memory", text, learner.total, room, _smaller(situation, model))
    weights = f"weights {gib(engine.weights)}; a {device.name} has {gib(room)}"
    of_server = situation.settings.rollout.ranks_per_server
    if ranks + situation.num_rollouts * of_server <= hardware.num_devices:
        way_out = "raise rollout.tensor_parallel: so many GPUs share a model; or a GPU with more memory, or a smaller model"
        yield verdict("engine memory", f"{engine.total.gib} with its cache: {weights}", engine.total, room, way_out)
        return
    both = learner.total + engine.total
    share = int(max(0.0, 1 - (learner.total.high + 0.03 * room) / room) * 20) / 20
    if share * room > 1.1 * engine.weights:
        way_out = f'rollout.server_args = ["--mem-fraction-static", "{share:g}"]'
    else:
        way_out = "a GPU for each: name more with --gpus, or use a smaller model"
        if ranks == of_server == 1:
            way_out += _turns_way_out(situation.settings, model, engine, room)
    text = f"{engine.total.gib} beside a rank of the learner, {both.gib} together: {weights}"
    yield verdict("engine memory", text, both, room, way_out)


def _turn_findings(
    learner: LearnerMemory, engine: EngineMemory, device: Device, parts: str, smaller: str
) -> Iterator[Finding]:
    """Whether each side fits while it has the device. ``parts``: of the learner's memory; ``smaller``: what shrinks it."""
    memory, room = colocated_memory(learner, engine), device.memory_bytes
    text = (
        f"{memory.learner.gib} while it has the device ({parts}, and {KEPT_BY_ENGINE.gib} that the server keeps); "
        f"a {device.name} has {gib(room)}"
    )
    yield verdict("learner memory", text, memory.learner, room, smaller)
    text = (
        f"{memory.engine.gib} while it has the device: with its cache, weights {gib(engine.weights)}, and what the "
        f"learner's process keeps; a {device.name} has {gib(room)}"
    )
    yield verdict("engine memory", text, memory.engine, room, "a smaller --mem-fraction-static in rollout.server_args")


def _turns_way_out(settings: Settings, model: ReadModel, engine: EngineMemory, room: float) -> str:
    """The arithmetic of run.colocate on a GPU that cannot hold both sides together; empty if one does not fit alone."""
    # A learner that leaves its device keeps copies that another one does without.
    colocated = settings.model_copy(update={"run": settings.run.model_copy(update={"colocate": True})})
    memory = colocated_memory(_learner_memory(model, colocated, cuda=True), engine)
    if memory.learner.low > room or memory.engine.low > room:
        return ""
    keys = ["run.colocate = true"]
    if settings.rollout.num_servers != 1:
        keys.append("rollout.num_servers = 1")
    if settings.learner.zero_stage != 2 and (settings.learner.zero_stage != 1 or settings.learner.dtype != "float32"):
        keys.append("learner.zero_stage = 2")
    return (
        f"; or {', '.join(keys)}: time-shared, the learner takes {memory.learner.gib}, then the engine {memory.engine.gib}, "
        f"of {gib(room)}, and {gib(memory.on_host)} more of the host's memory"
    )


def _cache(situation: Situation, engine: EngineMemory, prompt_tokens: float) -> Iterator[Finding]:
    """Whether the engine can hold the requests that it is given."""
    settings = situation.settings
    sampling, running = settings.largest_sampling, settings.rollout.max_running
    mean = min(float(sampling.max_tokens), prompt_tokens + sampling.max_turn_tokens / 2)
    fitting = engine.running(mean)
    text = (
        f"{engine.cache_tokens.low:,.0f} tokens of {engine.cache_bytes_per_token / 1024:.3g} KiB: {fitting:,.0f} sequences "
        f"of {mean:.0f} tokens; rollout.max_running is {running}"
    )
    on_host = situation.hardware.device is None
    if engine.cache_tokens.high < sampling.max_tokens:
        way_out = "lower sampling.max_tokens, or use a GPU with more memory"
        yield Finding(check="KV cache", status="fail", text=text, way_out=way_out, basis="estimated")
    elif fitting < running:
        larger = f"raise rollout.max_total_tokens to {round(mean * running):,}".replace(",", "_")
        share = larger if on_host else "use a larger share of the GPU"
        way_out = f"{share}, or lower rollout.max_running to {max(1, int(fitting))}"
        yield Finding(
            check="KV cache",
            status="warn",
            text=f"{text}: some wait, or are computed again",
            way_out=way_out,
            basis="estimated",
        )
    else:
        yield Finding(check="KV cache", status="ok", text=text, basis="estimated")


def _on_the_host(situation: Situation, model: ReadModel, learner: LearnerMemory, engine: EngineMemory) -> Iterator[Finding]:
    """Everything is in one memory."""
    assert model.shape is not None
    settings, hardware = situation.settings, situation.hardware
    servers = settings.rollout.num_servers
    of_learner = learner.total * settings.learner.num_ranks + learner_host(model.shape, settings, learner).total
    of_servers = (engine.total + rollout_host(model.shape, settings).total) * servers
    needed = of_learner + of_servers
    text = (
        f"{needed.gib}: learner {of_learner.gib}, {servers} servers {of_servers.gib}; this machine has "
        f"{gib(hardware.memory_bytes)}"
    )
    way_out = f"fewer servers (rollout.num_servers is {servers}), {_smaller(situation, model)}; or a smaller model"
    yield verdict("memory", text, needed, hardware.memory_bytes, way_out)


def _hosts(situation: Situation, model: ReadModel, learner: LearnerMemory) -> Finding:
    """Memory of the machines beside their GPUs."""
    assert model.shape is not None
    settings, hardware = situation.settings, situation.hardware
    main, rollout = learner_host(model.shape, settings, learner), rollout_host(model.shape, settings)
    checkpoint = f"{gib(main.checkpoint)} of a checkpoint"
    text = f"machine of rank 0: {main.total.gib} ({main.snapshots.gib} of versions, {checkpoint}"
    text += f", {gib(main.offloaded)} offloaded" if main.offloaded else ""
    text += f"); each rollout: {rollout.total.gib}"
    if not hardware.memory_bytes or situation.elsewhere:
        return _note("host memory", text)
    way_out = "learner.checkpoint_in_background = false, or a machine with more memory"
    needed = main.total + rollout.total * situation.num_rollouts
    text = f"{text}; this machine has {gib(hardware.memory_bytes)}"
    return verdict("host memory", text, needed, hardware.memory_bytes, way_out)
