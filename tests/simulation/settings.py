"""The settings of a plan's run, as its configuration file would have them, and those that the audit needs."""

import math
from pathlib import Path

from gspo_services.shared.settings.sections import (
    AgentSection,
    BatchSection,
    Broker,
    DataSection,
    Evaluation,
    Learner,
    Model,
    RewardSection,
    Rollout,
    Run,
    Sampling,
    Schedule,
    ScheduleSection,
    Settings,
)
from tests.simulation.audit.books import Rules
from tests.simulation.episodes import SimOptions
from tests.simulation.plan import STANDBY, Plan

REST_BATCHES = 2
WEIGHTS_ENDPOINTS = {"learner": "tcp://127.0.0.1:501", STANDBY: "tcp://127.0.0.1:502"}


def rules_of(plan: Plan, seed: int, options: SimOptions) -> Rules:
    return Rules(
        seed=seed,
        num_batches=plan.num_batches,
        group_size=plan.group_size,
        groups_per_batch=plan.groups_per_batch,
        max_lag=plan.max_lag,
        max_attempts=plan.max_attempts,
        max_filtered=math.ceil(plan.max_filtered * plan.groups_per_batch),
        num_tasks=plan.num_tasks,
        rest_after_groups=plan.rest_after_groups,
        rest_batches=REST_BATCHES,
        is_deterministic=plan.is_deterministic,
        options=options,
        agents=bool(plan.agents),
        reads_clock=plan.reads_clock,
        replays=plan.agents == "replay",
        compares=plan.compares,
    )


def settings_of(plan: Plan, directory: Path) -> Settings:
    """The settings of the plan's run, as its configuration file would have them."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    return Settings(
        run=Run(directory=directory, num_batches=plan.num_batches, seed=plan.seed % 2**31),
        model=Model(path=model),
        sampling=_sampling(plan),
        schedule=_schedule(plan),
        agent=_agent(plan),
        reward=RewardSection(group="tests.simulation.episodes:compared" if plan.compares else ""),
        batch=BatchSection(
            group_size=plan.group_size, groups_per_batch=plan.groups_per_batch, mini_batches=1, max_lag=plan.max_lag
        ),
        data=DataSection(
            dynamic_sampling=plan.max_filtered > 0,
            max_filtered=plan.max_filtered or 1.0,
            rest_after_groups=plan.rest_after_groups,
            rest_batches=REST_BATCHES,
        ),
        evaluation=Evaluation(every_batches=plan.evaluate_every_batches, num_tasks=plan.num_eval_tasks),
        broker=Broker(
            work_endpoint="tcp://127.0.0.1:1",
            batch_endpoint="tcp://127.0.0.1:2",
            lease_s=plan.lease_s,
            max_attempts=plan.max_attempts,
            failure_budget=1000,
            commit_interval_s=plan.commit_interval_s,
            batch_part_tokens=plan.part_tokens,
            keep_batches=1 if plan.archives else 0,
            archive_file_mib=0.0002,
        ),
        rollout=Rollout(
            max_running=plan.max_running, chunk_tokens=plan.chunk_tokens, pause_mode=plan.pause_mode, drain_s=5.0
        ),
        learner=Learner(
            weights_endpoint=WEIGHTS_ENDPOINTS["learner"], checkpoint_every_batches=plan.checkpoint_every_batches
        ),
    )


def _agent(plan: Plan) -> AgentSection:
    if not plan.agents:
        return AgentSection()
    return AgentSection(function="tests.simulation.agents.agent:play", on_replay=plan.agents)


def _schedule(plan: Plan) -> ScheduleSection:
    """Each changes with every batch, so that no two batches have the same."""
    if not plan.schedules:
        return ScheduleSection()
    return ScheduleSection(
        max_turn_tokens=Schedule(steps=[(batch, plan.max_turn_tokens + 2 * batch) for batch in range(1, plan.num_batches)]),
        max_tokens=Schedule(shape="linear", to=1024),
        temperature=Schedule(shape="linear", to=0.5),
        learning_rate=Schedule(shape="cosine", warmup=1),
    )


def _sampling(plan: Plan) -> Sampling:
    if not plan.agents:
        return Sampling(max_turn_tokens=plan.max_turn_tokens, max_tokens=plan.max_tokens)
    # Room for several conversations with what is rendered again.
    return Sampling(max_turn_tokens=plan.max_turn_tokens, max_tokens=512, max_episode_tokens=2048)
