"""Mistakes to plant in manifests, with the check that finds each."""

from tests.deploy.edits import (
    Mistake,
    container,
    edit_config,
    edit_query,
    edit_rule,
    pod_spec,
    rename,
    replace_argument,
    secret,
    set_environment,
    volume,
)
from tests.deploy.object_mistakes import OBJECT_MISTAKES

MISTAKES = OBJECT_MISTAKES | {
    # program
    "a command that does not exist": Mistake(
        "cpu", "commands", "no command 'serve'", lambda c: replace_argument(c, "broker", "broker", "serve")
    ),
    "an argument that the process does not accept": Mistake(
        "cpu", "commands", "--batch-size", lambda c: container(c, "learner")["args"].append("--batch-size=4")
    ),
    "an argument of another launcher": Mistake(
        "qwen3-30b-a3b", "commands", "--nnodes", lambda c: container(c, "learner-worker")["args"].append("--nnodes=2")
    ),
    "an option that `gspo model` does not accept": Mistake(
        "cpu",
        "commands",
        "--if-absent",
        lambda c: pod_spec(c, "rollout")["initContainers"][0].update(args=["model", "tiny", "/models/tiny", "--if-absent"]),
    ),
    "a configuration file that is not mounted": Mistake(
        "cpu",
        "commands",
        "/etc/gspo/run.toml is not mounted",
        lambda c: replace_argument(c, "rollout", "/etc/gspo/config/run.toml", "/etc/gspo/run.toml"),
    ),
    "rollouts of one name": Mistake(
        "cpu", "commands", "one name", lambda c: replace_argument(c, "rollout", "$(POD_NAME)", "rollout-0")
    ),
    "a variable that is not set": Mistake(
        "qwen3-30b-a3b",
        "commands",
        "$(RANK_OF_NODE)",
        lambda c: replace_argument(
            c, "learner-worker", "learner.node_rank=$(NODE_RANK)", "learner.node_rank=$(RANK_OF_NODE)"
        ),
    ),
    "a misspelt setting in an argument": Mistake(
        "qwen3-30b-a3b-lws",
        "settings",
        "learner.node_ranks",
        lambda c: replace_argument(
            c, "learner-worker", "learner.node_rank=$(LWS_WORKER_INDEX)", "learner.node_ranks=$(LWS_WORKER_INDEX)"
        ),
    ),
    "a misspelt key in the TOML file": Mistake(
        "cpu", "settings", "max_lags", lambda c: edit_config(c, "max_lag = 2", "max_lags = 2")
    ),
    "a misspelt setting in the environment": Mistake(
        "cpu",
        "settings",
        "broker.work_endpoints",
        lambda c: set_environment(c, "broker", "GSPO_BROKER__WORK_ENDPOINTS", "tcp://0.0.0.0:7001"),
    ),
    "a setting with one underscore": Mistake(
        "cpu", "settings", "GSPO_BROKER_LEASE_S", lambda c: set_environment(c, "broker", "GSPO_BROKER_LEASE_S", "30")
    ),
    "an endpoint that is open to other hosts without keys": Mistake(
        "cpu", "settings", "without keys", lambda c: edit_config(c, "allow_plaintext = true", "allow_plaintext = false")
    ),
    "an address of the wrong Service": Mistake(
        "cpu",
        "endpoints",
        "not a name of StatefulSet/broker",
        lambda c: edit_config(c, "tcp://broker:7001", "tcp://gspo-broker:7001"),
    ),
    "an address of the wrong port": Mistake(
        "cpu", "endpoints", "broker.batch_endpoint", lambda c: edit_config(c, "tcp://broker:7002", "tcp://broker:7001")
    ),
    "a process that binds only loopback": Mistake(
        "cpu", "endpoints", "127.0.0.1", lambda c: container(c, "broker")["env"][0].update(value="tcp://127.0.0.1:7001")
    ),
    "metrics that only the pod itself can read": Mistake(
        "cpu",
        "endpoints",
        "metrics are on",
        lambda c: edit_config(c, 'metrics_host = "0.0.0.0"', 'metrics_host = "127.0.0.1"'),
    ),
    "metrics on another port": Mistake(
        "cpu", "endpoints", "9111", lambda c: set_environment(c, "rollout", "GSPO_ROLLOUT__METRICS_PORT", "9111")
    ),
    "a rendezvous at another pod": Mistake(
        "qwen3-30b-a3b",
        "endpoints",
        "trainer-0.learner is not a name",
        lambda c: edit_config(c, "learner-0.learner:29500", "trainer-0.learner:29500"),
    ),
    "a rendezvous at another port": Mistake(
        "qwen3-30b-a3b-lws",
        "endpoints",
        "learner.rendezvous_address is on 29501, but rank 0 has 29500",
        lambda c: edit_config(c, "learner-0.learner:29500", "learner-0.learner:29501"),
    ),
    "a node's health on another port": Mistake(
        "qwen3-30b-a3b",
        "endpoints",
        "its health is on 9102, but the container's port is 9103",
        lambda c: container(c, "learner-worker")["ports"][0].update(containerPort=9103),
    ),
    "a ledger that is lost with its pod": Mistake(
        "cpu", "directories", "is lost with the pod", lambda c: edit_config(c, "/var/lib/gspo/run", "/tmp/run")
    ),
    "a model that is not mounted": Mistake(
        "cpu", "directories", "/model/tiny", lambda c: edit_config(c, "/models/tiny", "/model/tiny")
    ),
    "a model that is not downloaded": Mistake(
        "single-gpu-node", "directories", "Qwen3-8b", lambda c: edit_config(c, 'Qwen3-8B"', 'Qwen3-8b"')
    ),
    "weights that are fetched to a disk": Mistake(
        "cpu",
        "directories",
        "not a memory file system",
        lambda c: edit_config(c, "[rollout]\n", '[rollout]\nweights_directory = "/tmp"\n'),
    ),
    "a missing Secret": Mistake(
        "single-gpu-node", "keys", "no broker.secret", lambda c: c.objects.remove(secret(c, "gspo-key-broker"))
    ),
    "a key under another file name": Mistake(
        "single-gpu-node",
        "keys",
        "no learner.secret",
        lambda c: rename(secret(c, "gspo-key-learner")["data"], "learner.secret", "learner.key"),
    ),
    "a public key that was left out": Mistake(
        "single-gpu-node", "keys", "no rollout.public", lambda c: secret(c, "gspo-public-keys")["data"].pop("rollout.public")
    ),
    "another role's secret key": Mistake(
        "single-gpu-node",
        "keys",
        "not its own",
        lambda c: secret(c, "gspo-key-rollout")["data"].update({"learner.secret": ""}),
    ),
    "keys that everybody can read": Mistake(
        "single-gpu-node",
        "keys",
        "everybody can read",
        lambda c: volume(c, "broker", "keys")["projected"].update(defaultMode=0o644),
    ),
    "fewer GPUs than ranks": Mistake(
        "single-gpu-node",
        "ranks",
        "4 GPUs, but learner.num_ranks is 8",
        lambda c: edit_config(c, "num_ranks = 4", "num_ranks = 8"),
    ),
    "more nodes than pods": Mistake(
        "qwen3-30b-a3b",
        "ranks",
        "num_nodes is 4, but there are 2 pods",
        lambda c: edit_config(c, "num_nodes = 2", "num_nodes = 4"),
    ),
    "a group of more pods than nodes": Mistake(
        "qwen3-30b-a3b-lws",
        "ranks",
        "num_nodes is 2, but there are 3 pods",
        lambda c: c.one("LeaderWorkerSet", "learner")["spec"]["leaderWorkerTemplate"].update(size=3),
    ),
    "two nodes of one number": Mistake(
        "qwen3-30b-a3b",
        "ranks",
        "not each node once",
        lambda c: replace_argument(c, "learner-worker", "learner.node_rank=$(NODE_RANK)", "learner.node_rank=0"),
    ),
    "a worker with rank 0": Mistake(
        "qwen3-30b-a3b",
        "ranks",
        "rollouts fetch the weights from StatefulSet/learner",
        lambda c: [
            replace_argument(c, "learner-worker", "learner.node_rank=$(NODE_RANK)", "learner.node_rank=0"),
            container(c, "learner")["args"].extend(["--set", "learner.node_rank=1"]),
        ],
    ),
    "two learners": Mistake(
        "cpu",
        "ranks",
        "num_nodes is 1, but there are 2 pods",
        lambda c: c.one("StatefulSet", "learner")["spec"].update(replicas=2),
    ),
    "a metric that no process exports": Mistake(
        "single-gpu-node-scaled",
        "metrics",
        "gspo_broker_lag_average_versions",
        lambda c: edit_rule(c, "gspo_broker_lag_mean_versions", "gspo_broker_lag_average_versions"),
    ),
    "a counter without its _total": Mistake(
        "single-gpu-node-scaled",
        "metrics",
        "gspo_learner_wait_seconds",
        lambda c: edit_rule(c, "gspo_learner_wait_seconds_total", "gspo_learner_wait_seconds"),
    ),
    "a query of a series that no rule records": Mistake(
        "single-gpu-node-scaled",
        "metrics",
        "gspo_rollouts_needed",
        lambda c: edit_query(c, "gspo_rollouts_wanted", "gspo_rollouts_needed"),
    ),
    "an external metric that no rule records": Mistake(
        "cpu-monitored",
        "metrics",
        "gspo_rollouts_wanted",
        lambda c: c.objects.remove(c.one("PrometheusRule", "gspo")),
    ),
}
