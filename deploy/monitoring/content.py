"""The four dashboards: the run at a glance, what it learns, the fleet, the broker."""

from typing import Final

from deploy.monitoring.panels import (
    Dashboard,
    Panel,
    Query,
    Row,
    diagnostic,
    diagnostics,
    latest,
    mean,
    quantile,
    rate,
    share,
    total,
)

LAGS: Final = "lag_.*"
SIGNS: Final = "advantage_.*"
OURS: Final = 'component=~"broker|learner|rollout"'
"""Other programs in the namespace export process_* as well."""

REWARD = Panel(
    "Reward", "short", "Mean reward of the last batch, and of the last evaluation on held-out tasks.",
    (
        Query(latest("gspo_broker_train_reward"), "training"),
        Query(latest("gspo_broker_eval_reward"), "held out"),
    ),
)  # fmt: skip
LAG = Panel(
    "Lag of the last batch", "versions", "In policy versions. No token above the bound is trained on.",
    (
        Query(latest("gspo_broker_lag_mean_versions"), "mean"),
        Query(latest("gspo_broker_lag_max_versions"), "largest"),
        Query(latest("gspo_broker_max_lag_versions"), "batch.max_lag"),
    ),
)  # fmt: skip
CLIP = Panel(
    "Clip fraction", "percentunit", "Share of tokens whose gradient the clip removed; the paper has 15 %.",
    (
        Query(diagnostic("clip_fraction", "all"), "all"),
        Query(diagnostics("clip_fraction", SIGNS), "{{bucket}}"),
    ),
)  # fmt: skip
THROUGHPUT = Panel(
    "Throughput", "tokens/s", "Tokens that the engines generate, and that the learner trains on (prompts included).",
    (
        Query(rate("gspo_rollout_tokens_total", 'kind="action"'), "generated"),
        Query(rate("gspo_learner_tokens_total"), "trained on"),
    ),
)  # fmt: skip
WAITING = Panel(
    "What the learner does", "percentunit", "Share of its time. It waits much: too few rollouts. Lag rises: too many.",
    (
        Query(rate("gspo_learner_wait_seconds_total"), "waits for batches"),
        Query(rate("gspo_learner_batch_seconds_sum"), "trains"),
        Query(rate("gspo_learner_publish_seconds_sum"), "publishes"),
        Query(rate("gspo_learner_checkpoint_seconds_sum"), "saves"),
    ),
    top=1.0,
)  # fmt: skip
BATCHES = Panel(
    "Batches", "short", "Trained, covered by a checkpoint, and wanted.",
    (
        Query(latest("gspo_broker_batches_trained"), "trained"),
        Query(latest("gspo_broker_batches_checkpointed"), "in a checkpoint"),
        Query(latest("gspo_broker_batches_wanted"), "wanted"),
    ),
)  # fmt: skip
SERVING = Panel(
    "Rollouts", "short", "By state in the broker. silent: no message for broker.lease_s.",
    (Query(latest("gspo_broker_rollouts", by="status"), "{{status}}"),),
)  # fmt: skip
ALERTS = Panel(
    "Firing alerts", "short", "What they mean and what to do: docs/guide/monitoring.md.",
    (Query('count by (alertname) (ALERTS{alertstate="firing",alertname=~"Gspo.*"})', "{{alertname}}"),),
)  # fmt: skip

OVERVIEW = Dashboard(
    "gspo-overview", "GSPO: overview", "Does it learn, how stale is it, how fast is it, and what waits for what.",
    (
        Row("Learning", (REWARD, LAG, CLIP)),
        Row("Speed", (THROUGHPUT, WAITING, BATCHES)),
        Row("State", (SERVING, ALERTS)),
    ),
)  # fmt: skip

LEARNING = Dashboard(
    "gspo-learning", "GSPO: learning", "The diagnostics of docs/gspo.md, by lag and by sign of the advantage.",
    (
        Row("Reward", (
            REWARD,
            Panel("Components of the reward", "short", "Mean over the last batch, without weights.",
                  (Query(latest("gspo_broker_train_reward_component", by="name"), "{{name}}"),)),
            Panel("Evaluation sets", "short", "Metrics of each named set, of its last evaluation.",
                  (Query(latest("gspo_broker_eval_score", by="set, metric"), "{{set}} {{metric}}"),)),
            Panel("Zero-advantage groups", "percentunit", "All rewards of the group are equal, so its advantage is 0.",
                  (Query(latest("namespace:gspo_zero_advantage_groups:ratio"), "of the last batch"),), top=1.0),
            Panel("Entropy", "nats", "Entropy of the learner's distribution at action tokens.",
                  (Query(diagnostic("entropy", "all"), "all"), Query(diagnostics("entropy", SIGNS), "{{bucket}}"))),
        )),
        Row("Answers", (
            Panel("Length of answers", "short", "Sampled tokens of the last batch's trajectories, and the limits in force.",
                  (Query(latest("gspo_broker_answer_tokens", by="statistic"), "{{statistic}}"),
                   Query(latest("gspo_broker_sampling_limit_tokens", by="limit"), "limit of a {{limit}}"))),
            Panel("Answers cut off", "percentunit", "Ended by a limit on tokens. Rising: raise it, or schedule it.",
                  (Query(latest("gspo_broker_answers_cut_off_ratio"), "of the last batch"),), top=1.0),
            Panel("Pass rate by difficulty", "percentunit", "Positive rewards, by how the tasks did when they came last.",
                  (Query(latest("gspo_broker_pass_rate_ratio", by="difficulty"), "{{difficulty}}"),), top=1.0),
            Panel("Temperature", "short", "Mean over the last batch's groups.",
                  (Query(latest("gspo_broker_sampling_temperature"), "of the last batch"),)),
        )),
        Row("Clip", (
            Panel("Clip fraction by lag", "percentunit", "Uneven: the clip range does not follow the drift.",
                  (Query(diagnostics("clip_fraction", LAGS), "{{bucket}}"),)),
            Panel("Clip fraction by sign", "percentunit", "Only the upper bound clips positive advantages.",
                  (Query(diagnostic("clip_fraction_high", "advantage_positive"), "upper bound"),
                   Query(diagnostic("clip_fraction_low", "advantage_negative"), "lower bound"))),
            Panel("Sequence ratio", "short", "exp of the mean log-ratio. At 1 the policy equals the anchor.",
                  tuple(Query(diagnostic(name, "all"), name) for name in ("ratio_p01", "ratio_p50", "ratio_p99"))),
            Panel("Clip range by lag", "nats", "Bounds of the log-ratio (objective.clip_calibration).",
                  (Query(diagnostics("clip_range_high", LAGS), "{{bucket}} upper"),
                   Query(diagnostics("clip_range_low", LAGS), "{{bucket}} lower"))),
            Panel("Scale of the clip range", "short", "objective.adaptive_clip_target moves it; without a target it is 1.",
                  (Query(diagnostic("clip_scale"), "clip_scale"),)),
        )),
        Row("Staleness and mismatch", (
            Panel("Sequences by lag", "short", "In the last batch.", (Query(diagnostics("sequences", LAGS), "{{bucket}}"),)),
            Panel("Mismatch KL", "nats", "KL(engine || learner) per token. lag_0 is engine against learner, same weights.",
                  (Query(diagnostics("mismatch_kl", LAGS), "{{bucket}}"),)),
            Panel("Mismatch sigma", "nats", "Deviation of log-probs on current tokens; widens the clip range.",
                  (Query(diagnostic("mismatch_sigma"), "sigma"),)),
            Panel("Rejected sequences", "short", "Their mismatch weight is 0.",
                  (Query(diagnostic("rejected_sequences", "all"), "rejected"),)),
            Panel("Effective sample size", "percentunit", "1 means that all sequences count equally.",
                  (Query(diagnostic("effective_sample_size", "all"), "all"),), top=1.0),
        )),
        Row("Optimizer and experts", (
            Panel("Gradient norm", "short", "Before clipping: mean and largest of the batch's steps.",
                  (Query(diagnostic("grad_norm"), "mean"), Query(diagnostic("grad_norm_max"), "largest"))),
            Panel("Loss", "short", "Near 0 on policy; not a measure of progress.", (Query(diagnostic("loss"), "loss"),)),
            Panel("Expert load", "short", "Largest load over the mean; 1 is balanced.",
                  (Query(diagnostic("expert_load_max_over_mean", "all"), "max / mean"),)),
            Panel("Experts changed", "percentunit", "Choices unlike those at the batch's start, or unlike the engine's.",
                  (Query(diagnostic("experts_changed", "all"), "all"),
                   Query(diagnostic("experts_differ", "all"), "engine's"))),
        )),
    ),
)  # fmt: skip

FLEET = Dashboard(
    "gspo-fleet", "GSPO: fleet", "Every rollout and its SGLang server.",
    (
        Row("Work", (
            Panel("Generated tokens", "tokens/s", "By rollout.",
                  (Query(rate("gspo_rollout_tokens_total", 'kind="action"', "pod"), "{{pod}}"),)),
            Panel("Episodes in flight", "short", "Below the limit: no leases are left, or it does not serve.",
                  (Query(latest("gspo_rollout_episodes_running", by="pod"), "{{pod}}"),
                   Query(latest("gspo_rollout_episodes_limit"), "rollout.max_running"))),
            Panel("Ended episodes", "/s", "By outcome.",
                  (Query(rate("gspo_rollout_episodes_total", by="outcome"), "{{outcome}}"),)),
            Panel("Episode duration", "s", "From the lease to the end on this rollout.",
                  (Query(quantile(0.5, "gspo_rollout_episode_seconds"), "median"),
                   Query(quantile(0.95, "gspo_rollout_episode_seconds"), "95 %"))),
            Panel("Failed rewards", "/s", "By reason.",
                  (Query(rate("gspo_rollout_reward_failures_total", by="failure"), "{{failure}}"),)),
            Panel("Time of a reward", "s", "95 %: until a worker is free (reward.workers), and then until the result.",
                  (Query(quantile(0.95, "gspo_rollout_reward_seconds", 'part="wait"'), "wait"),
                   Query(quantile(0.95, "gspo_rollout_reward_seconds", 'part="work"'), "work"))),
        )),
        Row("Agents", (
            Panel("Calls of agents", "/s", "By HTTP status; 499: the agent went away.",
                  (Query(rate("gspo_rollout_endpoint_calls_total", by="status"), "{{status}}"),)),
            Panel("Time of a call", "s", "Calls that were answered.",
                  (Query(quantile(0.5, "gspo_rollout_endpoint_call_seconds"), "median"),
                   Query(quantile(0.95, "gspo_rollout_endpoint_call_seconds"), "95 %"))),
            Panel("Refused calls", "/s", "By code; the agent got the reason and the way out.",
                  (Query(rate("gspo_rollout_endpoint_refused_total", by="code"), "{{code}}"),)),
            Panel("Agents without a reward", "/s", "By reason.",
                  (Query(rate("gspo_rollout_agent_failures_total", by="failure"), "{{failure}}"),)),
            Panel("Repeated calls", "/s", "Answered from the record of an earlier run; turns that no repetition asked for.",
                  (Query(rate("gspo_rollout_agent_calls_replayed_total"), "replayed calls"),
                   Query(rate("gspo_rollout_turns_discarded_total"), "discarded turns"),
                   Query(rate("gspo_rollout_agent_divergences_total"), "divergences"))),
        )),
        Row("One time-shared GPU", (
            Panel("Who has the device", "short", "1: learner or rollout, with run.colocate. Neither: it changes hands.",
                  (Query(latest("gspo_learner_has_device"), "learner"),
                   Query(latest("gspo_rollout_has_device"), "rollout"))),
            Panel("Waits for the device", "percentunit", "Share of time. One waits while the other works; that is no fault.",
                  (Query(rate("gspo_learner_device_wait_seconds_total"), "learner"),
                   Query(rate("gspo_rollout_device_wait_seconds_total"), "rollout"))),
            Panel("Device changes hands", "/s", "Times each side got the device. Many short ones: docs/guide/colocate.md.",
                  (Query(rate("gspo_learner_device_acquired_total"), "learner"),
                   Query(rate("gspo_rollout_device_acquired_total"), "rollout"))),
        )),
        Row("Sandboxes", (
            Panel("Sandboxes", "short", "Of all servers (gspo sandbox): in use, waited for, and the most there may be.",
                  (Query(total("gspo_sandbox_used"), "in use"),
                   Query(total("gspo_sandbox_waiting"), "waited for"),
                   Query(total("gspo_sandbox_max_sandboxes"), "at most"))),
            Panel("Programs", "/s", "By how they ended; failed: by the sandbox's own fault, and they run again elsewhere.",
                  (Query(rate("gspo_sandbox_runs_total", by="ending"), "{{ending}}"),)),
            Panel("Time of a program", "s", "Wall-clock time of a program, and time until a client has a sandbox; 95 %.",
                  (Query(quantile(0.95, "gspo_sandbox_run_seconds"), "program"),
                   Query(quantile(0.95, "gspo_sandbox_wait_seconds"), "wait"))),
            Panel("Turned away", "/s", "Requests that got no sandbox, by reason; busy and draining clients come again.",
                  (Query(rate("gspo_sandbox_turned_away_total", by="reason"), "{{reason}}"),)),
        )),
        Row("Weights", (
            Panel("Policy version", "versions", "Published, and served by each rollout.",
                  (Query(latest("gspo_broker_policy_version"), "published"),
                   Query(latest("gspo_rollout_policy_version", by="pod"), "{{pod}}"))),
            Panel("Weight updates", "/s", "By outcome; failed: the engine did not hold what was sent.",
                  (Query(rate("gspo_rollout_weight_updates_total", by="outcome"), "{{outcome}}"),)),
            Panel("Time of an update", "s", "Mean time to fetch a version, and mean time for which generation pauses.",
                  (Query(mean("gspo_rollout_weight_fetch_seconds"), "fetch"),
                   Query(mean("gspo_rollout_generation_pause_seconds"), "pause"))),
            Panel("Bytes of weights", "bytes", "Per second, by who sends and who fetches.",
                  (Query(rate("gspo_learner_weight_bytes_sent_total"), "learner sends"),
                   Query(rate("gspo_rollout_weight_bytes_served_total"), "rollouts send"),
                   Query(rate("gspo_rollout_weight_bytes_total"), "fetched"))),
            Panel("Deltas", "percentunit", "Share of fetches; the rest are snapshots. 0 for float32.",
                  (Query(share("gspo_rollout_weight_fetches_total", 'kind="delta"'), "deltas"),), top=1.0),
            Panel("Weights from other rollouts", "/s", "By outcome. All but `fetched` come from the learner in the end.",
                  (Query(rate("gspo_rollout_weight_sources_total", by="outcome"), "{{outcome}}"),
                   Query(rate("gspo_learner_weight_sources_failed_total"), "back at the learner"))),
            Panel("Damaged weights", "short", "Damaged versions found since the rollout started.",
                  (Query(latest("gspo_rollout_weights_damaged_total", by="pod"), "{{pod}}"),)),
        )),
        Row("SGLang", (
            Panel("Requests", "short", "In the running batch, and waiting for room in it.",
                  (Query(total("sglang:num_running_reqs"), "running"),
                   Query(total("sglang:num_queue_reqs"), "queued"),
                   Query(total("sglang:num_retracted_reqs"), "retracted"))),
            Panel("KV cache in use", "percentunit", "By rollout. Full: requests are retracted.",
                  (Query(latest("sglang:token_usage", by="pod"), "{{pod}}"),), top=1.0),
            Panel("Generation throughput", "tokens/s", "As reported by SGLang, by rollout.",
                  (Query(latest("sglang:gen_throughput", by="pod"), "{{pod}}"),)),
            Panel("Time to the first token", "s", "Queueing and prefill.",
                  (Query(quantile(0.5, "sglang:time_to_first_token_seconds"), "median"),
                   Query(quantile(0.95, "sglang:time_to_first_token_seconds"), "95 %"))),
            Panel("Prefix cache hits", "percentunit", "By rollout.",
                  (Query(latest("sglang:cache_hit_rate", by="pod"), "{{pod}}"),), top=1.0),
            Panel("SGLang's metrics", "short", "1 while SGLang answers the scrape.",
                  (Query(latest("gspo_rollout_engine_metrics_up", by="pod"), "{{pod}}"),), top=1.0),
        )),
    ),
)  # fmt: skip

BROKER = Dashboard(
    "gspo-broker", "GSPO: broker", "Queues, leases, groups, the ledger's disk, and refused connections.",
    (
        Row("Work", (
            Panel("Groups", "short", "Open groups, complete groups, and the admission limit.",
                  (Query(latest("gspo_broker_groups", 'state=~"open|complete"', "state"), "{{state}}"),
                   Query(latest("gspo_broker_admission_limit_groups"), "limit"))),
            Panel("Trajectories", "short", "Leased, and free to be leased.",
                  (Query(latest("gspo_broker_leases"), "leased"), Query(latest("gspo_broker_free_trajectories"), "free"))),
            Panel("Dropped groups", "short", "Since the broker started, by reason.",
                  (Query(latest("gspo_broker_dropped_groups_total", by="reason"), "{{reason}}"),)),
            Panel("Groups filtered out", "short", "Zero advantage (data.dynamic_sampling). Since the broker started.",
                  (Query(latest("gspo_broker_filtered_groups_total"), "groups"),)),
            Panel("Quarantined batches", "short", "They ended their learner again and again; `gspo requeue` lists why.",
                  (Query(latest("gspo_broker_quarantined_batches_total"), "since the broker's start"),)),
            Panel("Length of trajectories", "short", "Median tokens, of finished ones and of those in dropped groups.",
                  (Query(quantile(0.5, "gspo_broker_trajectory_tokens", by="outcome"), "{{outcome}}"),)),
        )),
        Row("Messages", (
            Panel("Messages", "/s", "By type.", (Query(rate("gspo_broker_messages_total", by="type"), "{{type}}"),)),
            Panel("Waiting messages", "short", "Received and not yet handled; most are dropped at 16384.",
                  (Query(latest("gspo_broker_queue_messages"), "messages"),)),
            Panel("Stored tokens", "tokens/s", "Observations included.",
                  (Query(rate("gspo_broker_tokens_total"), "stored"),)),
            Panel("Refused messages", "/s", "By reason.",
                  (Query(rate("gspo_broker_refused_total", by="reason"), "{{reason}}"),)),
            Panel("Limited peers", "short", "Peers and keys that have used up their quota; `gspo doctor` names them.",
                  (Query(latest("gspo_broker_limited_peers", by="standing"), "{{standing}}"),)),
            Panel("Offences", "/s", "What is held against peers, by reason.",
                  (Query(rate("gspo_broker_offences_total", by="reason"), "{{reason}}"),)),
            Panel("Refused connections", "/s", "By reason: at the broker, and where the learner and rollouts serve weights.",
                  (Query(rate("gspo_broker_refused_connections_total", by="reason"), "broker: {{reason}}"),
                   Query(rate("gspo_learner_refused_connections_total", by="reason"), "learner: {{reason}}"),
                   Query(rate("gspo_rollout_refused_connections_total", by="reason"), "rollouts: {{reason}}"))),
        )),
        Row("Ledger and processes", (
            Panel("Time of a commit", "s", "Every acknowledgement waits for one.",
                  (Query(quantile(0.5, "gspo_broker_commit_seconds"), "median"),
                   Query(quantile(0.99, "gspo_broker_commit_seconds"), "99 %"))),
            Panel("Failed commits", "/s", "Nothing is acknowledged until a commit succeeds.",
                  (Query(rate("gspo_broker_commit_failures_total"), "failed"),)),
            Panel("Failed archive files", "/s", "Old batches stay in the ledger until their file is written.",
                  (Query(rate("gspo_broker_archive_failures_total"), "failed"),)),
            Panel("Disk", "bytes", "Free, and used by the ledger.",
                  (Query(latest("gspo_broker_disk_free_bytes"), "free"),
                   Query(latest("gspo_broker_database_bytes"), "ledger"))),
            Panel("Memory", "bytes", "Resident memory by process, without SGLang's own processes.",
                  (Query(latest("process_resident_memory_bytes", OURS, "pod"), "{{pod}}"),)),
            Panel("CPU", "short", "Cores, by process.",
                  (Query(rate("process_cpu_seconds_total", OURS, "pod"), "{{pod}}"),)),
        )),
    ),
)  # fmt: skip

DASHBOARDS: Final = (OVERVIEW, LEARNING, FLEET, BROKER)
