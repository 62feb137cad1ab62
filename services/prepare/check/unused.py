"""Settings that somebody has given and nothing will use, and settings that make a run slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import ReadModel, Situation, is_for_several_hosts
from gspo_services.shared.estimates import work_of
from gspo_services.shared.placement import Machine, placement_of, require_pythons, this_machine
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import SCHEDULED, Evaluation, Scheduled, curves, untried

MANY_MICRO_BATCHES: Final = 64
MUCH_EVALUATION: Final = 0.5
_OF_RIVALS: Final = {
    ("cispo",): ("cispo_cap",),
    ("sapo",): ("sapo_tau_positive", "sapo_tau_negative"),
    ("dppo",): ("dppo_bound", "dppo_cap"),
    ("m2po", "m2po_clip"): ("m2po_bound",),
}
"""Settings that these surrogates alone have. Another value than the default is refused; the default itself does nothing."""


def unused_findings(situation: Situation) -> Iterator[Finding]:
    """One line for each reason."""
    for keys, why in _rules(situation):
        given = [key for key in keys if situation.is_set(key)]
        if given:
            yield Finding(check="unused", status="note", text=f"{', '.join(given)}: {why}")


def schedule_findings(situation: Situation) -> Iterator[Finding]:
    """What the schedules do in this run, and what of them no batch reaches. Values were checked with the settings."""
    settings, num_batches = situation.settings, situation.settings.run.num_batches
    first, last = Scheduled.of(settings, 0), Scheduled.of(settings, num_batches - 1)
    spans = []
    for name, curve in curves(settings).items():
        spans.append(f"{SCHEDULED[name]} {getattr(first, name):g} to {getattr(last, name):g}")
        places = [("a step at batch", batch) for batch, _ in curve.steps] + [("its start at batch", curve.start or 0)]
        late = [(what, batch) for what, batch in places if batch >= num_batches]
        if late:
            yield Finding(
                check="schedule", status="warn",
                text=f"schedule.{name} has {late[0][0]} {late[0][1]}, which none of run.num_batches = {num_batches} reaches",
                way_out="raise run.num_batches, or lower that batch; batches count from 0",
            )  # fmt: skip
    if spans:
        text = f"in {num_batches} batches {'; '.join(spans)}"
        yield Finding(check="schedule", status="ok", text=text)


def _rules(situation: Situation) -> Iterator[tuple[list[str], str]]:
    yield from _rules_of_objective(situation)
    settings = situation.settings
    if not settings.evaluation.every_batches and not settings.evaluation.sets:
        yield ["evaluation.num_tasks"], "evaluation.every_batches is 0"
    of_agents = [key for key in situation.sources if key.startswith("agent.")]
    of_rewards = [key for key in situation.sources if key.startswith("reward.")]
    if not settings.reward.group:
        yield ["reward.group_deadline_s", "reward.group_weights"], "reward.group is not set"
    if settings.agent.is_used and not settings.reward.group:
        yield of_rewards, "an agent returns its reward itself"
    if not settings.agent.is_used:
        yield of_agents, "no agent.function, agent.command or agent.url"
    yield from _rules_of_processes(situation)


def _rules_of_objective(situation: Situation) -> Iterator[tuple[list[str], str]]:
    settings, objective = situation.settings, situation.settings.objective
    if objective.anchor == "proximal":
        of_behaviour = ["objective.clip_range_growth", "objective.noise_z", "objective.clip_calibration"]
        yield of_behaviour, 'for objective.anchor = "behaviour" only'
    if not objective.is_calibrated:
        yield ["objective.clip_calibration_cap"], "the clip range is not calibrated (objective.clip_calibration)"
    mode = "off" if objective.anchor == "behaviour" else objective.tis_mode or "truncate"
    for key, modes in (
        ("tis_cap", ("truncate", "reject")),
        ("tis_token_cap", ("truncate_tokens", "reject_tokens")),
        ("tis_token_floor", ("reject_tokens",)), ("tis_product_cap", ("truncate_product",)),
    ):  # fmt: skip
        if mode not in modes:
            yield [f"objective.{key}"], f'for tis_mode = "{modes[0]}", and it is "{mode}"'
    for rivals, names in _OF_RIVALS.items():
        if objective.surrogate not in rivals:
            yield [f"objective.{name}" for name in names], f'for objective.surrogate = "{rivals[0]}"'
    if objective.kl_coefficient == 0:
        yield ["objective.kl_estimator", "objective.kl_in"], "objective.kl_coefficient is 0"
    if not settings.distillation.teacher:
        yield ["distillation.coefficient"], "distillation.teacher is not set"
    if settings.distillation.only:
        of_rewards = ("advantage", "advantage_baseline", "normalise_by_std", "std_over", "overlong_buffer_tokens")
        yield [f"objective.{name}" for name in of_rewards], "distillation.only: rewards train nothing"
    if objective.overlong_buffer_tokens is None:
        yield ["objective.overlong_penalty"], "objective.overlong_buffer_tokens is not set"
    if objective.aggregation != "constant":
        yield ["objective.aggregation_tokens"], 'for objective.aggregation = "constant"'
    if settings.batch.mini_batches == 1 and objective.routing_replay and objective.routing_replay_from == "learner":
        yield ["objective.routing_replay"], "batch.mini_batches is 1, so experts are never replayed"


def _rules_of_processes(situation: Situation) -> Iterator[tuple[list[str], str]]:
    settings = situation.settings
    if settings.rollout.server_url:
        yield ["rollout.server_args", "rollout.server_port", "rollout.max_total_tokens"], "rollout.server_url runs already"
    elif situation.hardware.device is not None:
        yield ["rollout.max_total_tokens"], "on a GPU SGLang measures the room for its cache"
    if settings.learner.num_nodes == 1:
        yield ["learner.rendezvous_address"], "learner.num_nodes is 1"
    if not settings.learner.profile:
        yield ["learner.peak_tflops"], "learner.profile is false"
    if settings.model.dtype == settings.learner.dtype == "float32":
        yield ["model.float32_head"], "model.dtype and learner.dtype are float32: everything is"
    if not settings.lora.is_used:
        yield ["lora.alpha", "lora.target_modules"], "lora.rank is 0: all weights are trained"
    if settings.lora.publish == "merged":
        yield ["lora.max_loaded_loras"], 'for lora.publish = "adapter"'
    if is_for_several_hosts(settings):
        yield ["rollout.num_servers"], "for `gspo run` on one machine; elsewhere each rollout is started by itself"


def untried_findings(situation: Situation) -> Iterator[Finding]:
    """Options of the server that may make another policy of it."""
    for name in untried(situation.settings.rollout.server_args):
        yield Finding(
            check="server options", status="warn",
            text=f"rollout.server_args has {name}: nobody has compared a server with it with the learner",
            way_out="leave it out, or watch mismatch_sigma and mismatch_kl from the first batch on",
        )  # fmt: skip


def slow_findings(situation: Situation, model: ReadModel, prompt_tokens: float) -> Iterator[Finding]:
    """Settings that leave something idle."""
    settings, ranks = situation.settings, situation.num_ranks
    work = work_of(settings, prompt_tokens)
    budget = settings.learner.max_tokens_per_micro_batch
    mini_batch = work.all_tokens / settings.batch.mini_batches
    micro = mini_batch / ranks / budget
    sequences = work.sequences / settings.batch.mini_batches
    if sequences < ranks:
        yield Finding(
            check="slow", status="warn", text=f"a mini-batch has {sequences:.0f} sequences for {ranks} ranks: some are idle",
            way_out="raise batch.groups_per_batch, or lower batch.mini_batches or learner.num_ranks",
        )  # fmt: skip
    elif micro > MANY_MICRO_BATCHES:
        yield Finding(
            check="slow", status="note", basis="estimated",
            text=f"some {micro:.0f} micro-batches a rank and step: learner.max_tokens_per_micro_batch ({budget}) may "
            "be larger",
        )  # fmt: skip
    admitted = (settings.batch.max_lag + 1) * work.sequences
    places = situation.num_rollouts * settings.rollout.max_running
    if places > admitted:
        yield Finding(
            check="slow", status="note",
            text=f"{places} places for episodes (rollout.max_running) and at most {admitted} under way: "
            f"(max_lag + 1) x groups_per_batch x group_size",
        )  # fmt: skip
    evaluation = settings.evaluation
    if evaluation.every_batches or evaluation.sets:
        share = evaluated_per_batch(evaluation) / work.sequences
        if share > MUCH_EVALUATION:
            yield Finding(
                check="slow", status="note",
                text=f"evaluation samples {share:.0%} of what training does; num_tasks or samples may be lower",
            )  # fmt: skip
    yield from _crowded(situation)


def evaluated_per_batch(evaluation: Evaluation) -> float:
    """Trajectories that evaluations sample for each batch."""
    if not evaluation.sets:
        return evaluation.num_tasks / evaluation.every_batches
    sets = evaluation.in_runs().values()
    return sum(each.samples * (each.num_tasks or evaluation.num_tasks) / evaluation.interval(each) for each in sets)


def _crowded(situation: Situation) -> Iterator[Finding]:
    settings, hardware = situation.settings, situation.hardware
    if situation.elsewhere:
        return
    servers, ranks = settings.rollout.num_servers, settings.learner.num_ranks
    if hardware.device is None and servers + ranks > hardware.cores + 1:
        yield Finding(
            check="slow", status="note",
            text=f"{servers} servers and {ranks} ranks on {hardware.cores} cores: more processes than cores gain nothing",
        )  # fmt: skip
    yield from _places(situation)


def _places(situation: Situation) -> Iterator[Finding]:
    """Where ``gspo run`` would put the processes, on this machine or on one that was named."""
    settings, hardware = situation.settings, situation.hardware
    # Of a machine that was only named, any core may be.
    cores = tuple({*settings.learner.cores, *settings.rollout.cores}) if hardware.is_named else this_machine().cores
    machine = Machine(gpus=tuple(map(str, range(hardware.num_devices))), cores=cores)
    try:
        require_pythons(settings)
        placement = placement_of(settings, machine)
    except ConfigurationError as error:
        text, _, way_out = str(error).rpartition(": ")
        yield Finding(check="placement", status="fail", text=text, way_out=way_out)
        return
    if placement.text:
        yield Finding(check="placement", status="note", text=placement.text)
