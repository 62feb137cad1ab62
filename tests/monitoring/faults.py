"""For each alert, a fault that sets it off and the texts that it then has."""

from dataclasses import dataclass, field

from tests.monitoring.series import (
    BROKER,
    INTERVAL_S,
    LEARNER,
    OTHER,
    ROLLOUT,
    SANDBOX,
    Series,
    gone_after,
    rising,
    series,
    steady,
    then,
)

RUN = {"namespace": "run"}
TARGET = {**RUN, "component": "rollout", "pod": "rollout-1", "instance": "rollout-1:1", "job": "gspo"}
POD = {**RUN, "pod": "rollout-1", "instance": "rollout-1:1"}


@dataclass(frozen=True)
class Fault:
    """One fault. ``changes`` replace series of the healthy run; an empty value removes one."""

    changes: Series
    minutes: float
    """The alert fires by then."""
    summary: str
    description: str
    labels: dict[str, str] = field(default_factory=lambda: dict(RUN))
    quiet_minutes: float | None = None
    """The alert does not fire yet at this time: it waits for its ``for`` or its window."""


def diagnostic(name: str, bucket: str) -> str:
    return series("gspo_learner_diagnostic", f'name="{name}",bucket="{bucket}"', LEARNER)


FAULTS: dict[str, Fault] = {
    "GspoProcessDown": Fault(
        {series("up", "", OTHER): then("1", 20, 0)},
        minutes=21.5,
        quiet_minutes=20.5,
        summary="rollout rollout-1 does not answer",
        description="rollout-1:1 has not answered a scrape of /metrics for a minute.",
        labels=TARGET,
    ),
    "GspoNotBegun": Fault(
        {series("gspo_broker_policy_version", "", BROKER): steady(0)},
        minutes=52,
        quiet_minutes=48,
        summary="The run has not begun",
        description="For 50 minutes its 4 processes have published no version: the model may still be downloaded.",
    ),
    "GspoProcessMissing": Fault(
        {series("up", "", LEARNER): gone_after(1, 20)},
        # Without a staleness mark, Prometheus keeps a series for five minutes.
        minutes=28,
        quiet_minutes=21,
        summary="There is no learner",
        description='Of this run Prometheus has other targets, and none with component="learner": nothing can be trained.',
        labels={**RUN, "component": "learner"},
    ),
    "GspoLearnerAway": Fault(
        {series("gspo_broker_peers", 'role="learner"', BROKER): then("1", 20, 0)},
        minutes=23,
        quiet_minutes=21.5,
        summary="The broker has no learner",
        description="No learner has said hello to this broker (0 known): groups pile up until admission stops.",
    ),
    "GspoNoRollouts": Fault(
        {series("gspo_broker_rollouts", 'status="serving"', BROKER): then("2", 20, 0)},
        minutes=24,
        quiet_minutes=22,
        summary="No rollout serves",
        description="0 rollouts are serving: nothing is generated, and the learner will starve.",
    ),
    "GspoRolloutNotServing": Fault(
        {series("gspo_rollout_status", 'status="serving"', OTHER): then("1", 20, 0)},
        minutes=36,
        quiet_minutes=34,
        summary="Rollout rollout-1 does not serve",
        description="rollout-1:1 runs and has not been serving for 15 minutes: it takes no leases.",
        labels=POD,
    ),
    "GspoNoProgress": Fault(
        {series("gspo_broker_quiet_seconds", "", BROKER): rising(INTERVAL_S, start=-300)},
        minutes=40,
        quiet_minutes=35.5,
        summary="No batch was trained for 35m 0s",
        description="The last batch was reported 35m 0s ago and the run is not over.",
    ),
    "GspoLearnerStarved": Fault(
        {series("gspo_learner_wait_seconds_total", "", LEARNER): rising(12)},
        minutes=30,
        quiet_minutes=14,
        summary="The learner waits 80% of its time",
        description="It waits for batches 80% of its time (5 minutes' mean; 50 % is the bound).",
    ),
    "GspoGroupsDropped": Fault(
        {series("gspo_broker_dropped_groups_total", 'reason="failed"', BROKER): then("2", 20, 5)},
        minutes=25,
        quiet_minutes=19,
        summary="Groups are dropped as failed",
        description="3 groups were dropped in 15 minutes, reason: failed.",
        labels={**RUN, "reason": "failed"},
    ),
    "GspoBatchQuarantined": Fault(
        {series("gspo_broker_quarantined_batches_total", "", BROKER): then("1", 20, 3)},
        minutes=25,
        quiet_minutes=19,
        summary="A batch ended its learner again and again, and was quarantined",
        description="2 batches were quarantined in 15 minutes; after three in a row the run stops.",
    ),
    "GspoEpisodesFail": Fault(
        {series("gspo_rollout_episodes_total", 'outcome="engine_error"', OTHER): rising(20)},
        minutes=20,
        quiet_minutes=4,
        summary="21.57% of the episodes fail",
        description="21.57% of the episodes end in an error of the reward, the environment or SGLang.",
    ),
    "GspoLagBeyondBound": Fault(
        {series("gspo_broker_lag_max_versions", "", BROKER): then("2", 20, 3)},
        minutes=21,
        quiet_minutes=19,
        summary="A token of lag 3 was trained on",
        description="The last batch holds a token that is 3 versions old, beyond batch.max_lag. This must never happen.",
    ),
    "GspoLagNearBound": Fault(
        {series("gspo_broker_lag_mean_versions", "", BROKER): then("1.2", 20, 1.9)},
        minutes=36,
        quiet_minutes=34,
        summary="Mean lag is 95% of batch.max_lag",
        description="Batches are nearly as old as allowed (95% of batch.max_lag on average).",
    ),
    "GspoMismatchHigh": Fault(
        {diagnostic("mismatch_kl", "lag_0"): then("0.001", 20, 0.05)},
        minutes=31,
        quiet_minutes=29,
        summary="Engine and learner differ by 50m nats a token",
        description="KL(engine || learner) of tokens of the current version is 50m nats; 0.02 is the bound.",
    ),
    "GspoBiasBeyondClip": Fault(
        {diagnostic("calibration_bias", "lag_1"): then("0.2", 20, 3)},
        minutes=31,
        quiet_minutes=29,
        summary="The mismatch of some lag lies beyond its clip range",
        description="Before a batch is learned, its log-ratios lie at 3 times a bound of the clip range.",
    ),
    "GspoClipFractionHigh": Fault(
        {diagnostic("clip_fraction", "all"): then("0.15", 20, 0.75)},
        minutes=36,
        quiet_minutes=34,
        summary="75% of the tokens are clipped",
        description="The clip removes the gradient of 75% of the tokens; the paper has 15 %.",
    ),
    "GspoClipNeverActs": Fault(
        {diagnostic("clip_fraction", "all"): then("0.15", 20, 0)},
        minutes=51,
        quiet_minutes=49,
        summary="Nothing is clipped",
        description="The clip fraction has been 0 for half an hour, with several optimizer steps a batch.",
    ),
    "GspoZeroAdvantage": Fault(
        {series("gspo_broker_zero_advantage_groups", "", BROKER): then("6", 20, 18)},
        minutes=36,
        quiet_minutes=34,
        summary="90% of the groups teach nothing",
        description="In 90% of the last batch's groups all rewards are equal: their advantage is 0.",
    ),
    "GspoWeightUpdatesFail": Fault(
        {series("gspo_learner_weight_loads_failed_total", "", LEARNER): then("1", 20, 4)},
        minutes=22,
        quiet_minutes=19,
        summary="Engines do not take the learner's weights",
        description="3 times in 10 minutes an engine did not hold what was sent, and was quarantined.",
        labels={**RUN, "component": "learner", "pod": "learner-0", "instance": "learner-0:1", "job": "gspo"},
    ),
    "GspoEngineQuarantined": Fault(
        {series("gspo_broker_rollouts", 'status="quarantined"', BROKER): then("0", 20, 1)},
        minutes=21.5,
        quiet_minutes=20.5,
        summary="1 rollouts are quarantined",
        description="1 rollouts hold weights that could not be verified: they get no work until they are.",
    ),
    "GspoWeightsNotFetched": Fault(
        {series("gspo_rollout_weight_updates_total", 'outcome="not_fetched"', OTHER): rising(1)},
        minutes=30,
        quiet_minutes=4,
        summary="Rollout rollout-1 cannot fetch weights",
        description="20 attempts in 5 minutes got no weights from the learner.",
        labels=POD,
    ),
    "GspoWeightsDamaged": Fault(
        # Once at each of two rollouts.
        {
            series("gspo_rollout_weights_damaged_total", "", ROLLOUT): then("2", 20, 3),
            series("gspo_rollout_weights_damaged_total", "", OTHER): then("0", 30, 1),
        },
        minutes=31,
        quiet_minutes=29,
        summary="Weights arrive damaged",
        description=(
            "2 times in an hour a version arrived that differed from what the learner published; it was fetched again."
        ),
    ),
    "GspoPeerWeightsFail": Fault(
        {
            series("gspo_rollout_weight_sources_total", f'outcome="{outcome}"', of): rising(a_sample)
            for outcome, a_sample in (("fetched", 0.05), ("failed", 0.1), ("damaged", 0.05))
            for of in (ROLLOUT, OTHER)
        },
        minutes=30,
        quiet_minutes=9,
        summary="Rollouts get no weights from each other",
        description="75% of the fetches from other rollouts fail: the learner sends those bytes.",
    ),
    "GspoRolloutBehind": Fault(
        {series("gspo_rollout_policy_version", "", OTHER): then("29", 20, 25)},
        minutes=26,
        quiet_minutes=24,
        summary="Rollout rollout-1 is 5 versions behind",
        description="rollout-1:1 serves weights 5 versions old: too old for new leases.",
        labels=POD,
    ),
    "GspoCommitsFail": Fault(
        {series("gspo_broker_commit_failures_total", "", BROKER): then("3", 20, 7)},
        minutes=21,
        quiet_minutes=19,
        summary="The ledger cannot be written",
        description="4 commits failed in 2 minutes; nothing is acknowledged until one succeeds.",
        labels={**RUN, "component": "broker", "pod": "broker-0", "instance": "broker-0:1", "job": "gspo"},
    ),
    "GspoDiskFilling": Fault(
        {series("gspo_broker_disk_free_bytes", "", BROKER): then("60e9", 20, 4e9)},
        minutes=31,
        quiet_minutes=29,
        summary="The ledger's disk is filling",
        description="The file system of run.directory is nearly full, or will be within 4 hours at this rate.",
        labels={**RUN, "component": "broker", "pod": "broker-0", "instance": "broker-0:1", "job": "gspo"},
    ),
    "GspoLedgerDamaged": Fault(
        {series("gspo_broker_damaged_rows", "", BROKER): then("0", 20, 2)},
        minutes=21,
        quiet_minutes=19,
        summary="A disk has changed the ledger",
        description="2 rows or archive files are not what was written; see event damage_found.",
        labels=RUN,
    ),
    "GspoCheckpointDamaged": Fault(
        {series("gspo_learner_damaged_checkpoint_files", "", LEARNER): then("0", 20, 2)},
        minutes=21,
        quiet_minutes=19,
        summary="A disk has changed a checkpoint",
        description="2 files of checkpoints are not what was written; see event checkpoint_damage_found.",
        labels=RUN,
    ),
    "GspoLogGrows": Fault(
        {series("gspo_broker_log_bytes", "", BROKER): then("4e6", 20, 2147483648)},
        minutes=26,
        quiet_minutes=24,
        summary="The ledger's write-ahead log grows",
        description="It has 2GiB: a reader holds it.",
        labels=RUN,
    ),
    "GspoArchiveFails": Fault(
        {series("gspo_broker_archive_failures_total", "", BROKER): rising(0.5)},
        minutes=31,
        quiet_minutes=9,
        summary="Old batches cannot be archived",
        description="30 archive files failed in 15 minutes: the ledger keeps growing.",
        labels=RUN,
    ),
    "GspoBrokerOverloaded": Fault(
        {series("gspo_broker_queue_messages", "", BROKER): then("12", 20, 1024)},
        minutes=26,
        quiet_minutes=24,
        summary="The broker does not keep up",
        description="1024 messages wait to be handled; at 16384 the broker drops those of the peers with most.",
        labels={**RUN, "component": "broker", "pod": "broker-0", "instance": "broker-0:1", "job": "gspo"},
    ),
    "GspoPeerLimited": Fault(
        {series("gspo_broker_limited_peers", 'standing="slowed"', BROKER): then("0", 20, 2)},
        minutes=21,
        quiet_minutes=19,
        summary="A peer is limited: slowed",
        description="2 peers or keys have used up their quota of the broker; `gspo doctor` names them.",
        labels={**RUN, "standing": "slowed"},
    ),
    "GspoConnectionsRefused": Fault(
        {series("gspo_learner_refused_connections_total", 'reason="unknown_key"', LEARNER): then("1", 20, 4)},
        minutes=22,
        quiet_minutes=19,
        summary="The learner refuses connections: unknown_key",
        description="3 connections in 10 minutes, reason: unknown_key.",
        labels={**RUN, "component": "learner", "reason": "unknown_key"},
    ),
    "GspoSandboxesFail": Fault(
        {series("gspo_sandbox_runs_total", 'ending="failed"', SANDBOX): rising(100)},
        minutes=20,
        summary="Sandboxes fail",
        description="4000 sandboxes or programs failed in 10 minutes by the sandbox's own fault: programs wait for another.",
    ),
    "GspoSandboxesFull": Fault(
        {series("gspo_sandbox_waiting", "", SANDBOX): then("0", 20, 3)},
        minutes=31,
        quiet_minutes=29,
        summary="Programs wait for a sandbox",
        description="3 clients have waited for a sandbox for 10 minutes: rewards come late, and rollouts hold their "
        "episodes.",
    ),
}

LATE = 160
"""Samples of 40 minutes."""


def late(value: str) -> str:
    """Nothing for 40 minutes, then ``value``."""
    return f"_x{LATE} {value}"


STARTING: Series = {
    **{series("up", "", of): f"0+0x{LATE} 1+0x60" for of in (BROKER, LEARNER, ROLLOUT, OTHER)},
    # The broker comes first; the learner loads for five minutes, and SGLang for five more.
    series("gspo_broker_stopping", "", BROKER): late("0+0x80"),
    series("gspo_broker_policy_version", "", BROKER): late("0+0x20 1+0x60"),
    series("gspo_broker_peers", 'role="learner"', BROKER): late("0+0x20 1+0x60"),
    series("gspo_broker_rollouts", 'status="serving"', BROKER): late("0+0x28 2+0x60"),
    series("gspo_broker_quiet_seconds", "", BROKER): late("0+15x80"),
}
"""A start whose model is downloaded for 40 minutes, while processes end and are started again."""
OVER = {series("gspo_broker_stopping", "", BROKER): steady(1)}
"""With this added, the run is over and the alerts in EXCUSED do not fire."""
PAUSED: Series = {
    # `gspo stop` after 20 minutes. Rollouts and learner are scaled to 0, and 15 minutes later the broker, too.
    series("gspo_broker_stopping", "", BROKER): "0+0x79 1+0x67 stale",
    **{series("up", "", of): "1+0x87 stale" for of in (LEARNER, ROLLOUT, OTHER)},
    series("up", "", BROKER): "1+0x147 stale",
    series("gspo_broker_peers", 'role="learner"', BROKER): "1+0x87 0+0x59 stale",
    series("gspo_broker_rollouts", 'status="serving"', BROKER): "2+0x87 0+0x59 stale",
    series("gspo_broker_quiet_seconds", "", BROKER): "30+0x79 30+15x67 stale",
    series("gspo_broker_policy_version", "", BROKER): "30+0x147 stale",
}
"""A run that is stopped as the guide says, and stays so."""
EXCUSED = ("GspoLearnerAway", "GspoNoRollouts", "GspoNoProgress", "GspoLearnerStarved")
