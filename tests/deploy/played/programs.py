"""Mistakes in what containers start, with which settings, ports, keys and ranks."""

from tests.deploy.edits import (
    MAIN,
    POD,
    Planted,
    container,
    edit_config,
    rename,
    replace_argument,
    secret,
    set_environment,
    volume,
)

PROGRAMS = {
    "a command that does not exist": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.args", "is no command",
        lambda c: replace_argument(c, "broker", "broker", "serve"),
    ),
    "an argument that the process does not accept": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.args", "--batch-size",
        lambda c: container(c, "learner")["args"].append("--batch-size=4"),
    ),
    "an argument of another launcher": Planted(
        "qwen3-30b-a3b", f"StatefulSet/learner-worker {MAIN}.args",
        "`gspo learner` refuses its arguments: unrecognized arguments",
        lambda c: container(c, "learner-worker")["args"].append("--nnodes=2"),
    ),
    "a configuration file that is not mounted": Planted(
        "cpu", f"Deployment/rollout {MAIN}.args", "is not there: no ConfigMap",
        lambda c: replace_argument(c, "rollout", "/etc/gspo/config/run.toml", "/etc/gspo/run.toml"),
    ),
    "rollouts of one name": Planted(
        "cpu", f"Deployment/rollout {MAIN}.args", "all of its pods are called 'rollout-0': the broker takes only",
        lambda c: replace_argument(c, "rollout", "$(POD_NAME)", "rollout-0"),
    ),
    "a variable that is not set": Planted(
        "qwen3-30b-a3b", f"StatefulSet/learner-worker {MAIN}.args", "no variable of the container",
        lambda c: replace_argument(
            c, "learner-worker", "learner.node_rank=$(NODE_RANK)", "learner.node_rank=$(RANK_OF_NODE)"
        ),
    ),
    "a misspelt setting in an argument": Planted(
        "qwen3-30b-a3b-lws", "ConfigMap/gspo-run-* data.run.toml", "learner.node_ranks",
        lambda c: replace_argument(
            c, "learner-worker", "learner.node_rank=$(LWS_WORKER_INDEX)", "learner.node_ranks=$(LWS_WORKER_INDEX)"
        ),
    ),
    "a misspelt key in the TOML file": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "Deployment/rollout ends with status 2: run.toml",
        lambda c: edit_config(c, "max_lag = 2", "max_lags = 2"),
    ),
    "a misspelt setting in the environment": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "broker.work_endpoints",
        lambda c: set_environment(c, "broker", "GSPO_BROKER__WORK_ENDPOINTS", "tcp://0.0.0.0:7001"),
    ),
    "a setting with one underscore": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.env[2].name", "GSPO_BROKER_LEASE_S",
        lambda c: set_environment(c, "broker", "GSPO_BROKER_LEASE_S", "30"),
    ),
    "an endpoint that is open to other hosts without keys": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "without keys",
        lambda c: edit_config(c, "allow_plaintext = true", "allow_plaintext = false"),
    ),
    "an address of the wrong Service": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "broker.work_endpoint is tcp://gspo-broker:7001, and",
        lambda c: edit_config(c, "tcp://broker:7001", "tcp://gspo-broker:7001"),
    ),
    "an address of the wrong port": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "broker.batch_endpoint",
        lambda c: edit_config(c, "tcp://broker:7002", "tcp://broker:7001"),
    ),
    "a process that binds only loopback": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "StatefulSet/broker binds broker.work_endpoint to",
        lambda c: container(c, "broker")["env"][0].update(value="tcp://127.0.0.1:7001"),
    ),
    "metrics that only the pod itself can read": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "Deployment/rollout binds rollout.metrics_port to",
        lambda c: edit_config(c, 'metrics_host = "0.0.0.0"', 'metrics_host = "127.0.0.1"'),
    ),
    "metrics on another port": Planted(
        "cpu", "ConfigMap/gspo-run-* data.run.toml", "Deployment/rollout binds rollout.metrics_port to",
        lambda c: set_environment(c, "rollout", "GSPO_ROLLOUT__METRICS_PORT", "9111"),
    ),
    "a rendezvous at another pod": Planted(
        "qwen3-30b-a3b", "ConfigMap/gspo-run-* data.run.toml", "learner.rendezvous_address is tcp://trainer-0.learner:29500",
        lambda c: edit_config(c, "learner-0.learner:29500", "trainer-0.learner:29500"),
    ),
    "a rendezvous at another port": Planted(
        "qwen3-30b-a3b-lws", "ConfigMap/gspo-run-* data.run.toml",
        "learner.rendezvous_address is tcp://learner-0.learner:29501",
        lambda c: edit_config(c, "learner-0.learner:29500", "learner-0.learner:29501"),
    ),
    "a node's health on another port": Planted(
        "qwen3-30b-a3b", "ConfigMap/gspo-run-* data.run.toml", "StatefulSet/learner-worker binds learner.metrics_port to",
        lambda c: container(c, "learner-worker")["ports"][0].update(containerPort=9103),
    ),
    "a ledger that is lost with its pod": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.volumeMounts[3]", "run.directory /tmp/run is on no claim: what `gspo broker` has",
        lambda c: edit_config(c, "/var/lib/gspo/run", "/tmp/run"),
    ),
    "a model that is not mounted": Planted(
        "cpu", f"Deployment/rollout {MAIN}.volumeMounts", "nothing is mounted where model.path is, /model/tiny: `gspo",
        lambda c: edit_config(c, "/models/tiny", "/model/tiny"),
    ),
    "a model that is not downloaded": Planted(
        "single-gpu-node", f"Deployment/rollout {MAIN}.volumeMounts[2]", "model.path /models/Qwen3-8b is not what",
        lambda c: edit_config(c, 'Qwen3-8B"', 'Qwen3-8b"'),
    ),
    "weights that are fetched to a disk": Planted(
        "cpu", f"Deployment/rollout {MAIN}.volumeMounts", "rollout.weights_directory /tmp is no memory file system: each",
        lambda c: edit_config(c, "[rollout]\n", '[rollout]\nweights_directory = "/tmp"\n'),
    ),
    "a missing Secret": Planted(
        "single-gpu-node", f"StatefulSet/broker {POD}.volumes[1]", "no broker.secret",
        lambda c: c.objects.remove(secret(c, "gspo-key-broker")),
    ),
    "a key under another file name": Planted(
        "single-gpu-node", f"StatefulSet/learner {POD}.volumes[2]", "no learner.secret",
        lambda c: rename(secret(c, "gspo-key-learner")["data"], "learner.secret", "learner.key"),
    ),
    "a public key that was left out": Planted(
        "single-gpu-node", f"StatefulSet/broker {POD}.volumes[1]",
        "security.keys /etc/gspo/keys has no rollout*.public: its",
        lambda c: secret(c, "gspo-public-keys")["data"].pop("rollout.public"),
    ),
    "another role's secret key": Planted(
        "single-gpu-node", f"Deployment/rollout {POD}.volumes[3]",
        "security.keys /etc/gspo/keys holds learner.secret, the key of",
        lambda c: secret(c, "gspo-key-rollout")["data"].update({"learner.secret": ""}),
    ),
    "keys that everybody can read": Planted(
        "single-gpu-node", f"StatefulSet/broker {POD}.volumes[1]", "every user of the container can read its secret key",
        lambda c: volume(c, "broker", "keys")["projected"].update(defaultMode=0o644),
    ),
    "fewer GPUs than ranks": Planted(
        "single-gpu-node", f"StatefulSet/learner {MAIN}.resources.limits.nvidia.com/gpu",
        "4 GPUs, and learner.num_ranks, the ranks on each node, is 8",
        lambda c: edit_config(c, "num_ranks = 4", "num_ranks = 8"),
    ),
    "more nodes than pods": Planted(
        "qwen3-30b-a3b", "StatefulSet/learner-worker spec.replicas", "the learner has 2 pods, and learner.num_nodes is 4",
        lambda c: edit_config(c, "num_nodes = 2", "num_nodes = 4"),
    ),
    "a group of more pods than nodes": Planted(
        "qwen3-30b-a3b-lws", "LeaderWorkerSet/learner spec.leaderWorkerTemplate.size",
        "the learner has 3 pods, and learner.num_nodes is 2",
        lambda c: c.one("LeaderWorkerSet", "learner")["spec"]["leaderWorkerTemplate"].update(size=3),
    ),
    "two nodes of one number": Planted(
        "qwen3-30b-a3b", f"StatefulSet/learner-worker {MAIN}", "learner.node_rank",
        lambda c: replace_argument(c, "learner-worker", "learner.node_rank=$(NODE_RANK)", "learner.node_rank=0"),
    ),
    "a worker with rank 0": Planted(
        "qwen3-30b-a3b", f"StatefulSet/learner-worker {MAIN}", "has learner.node_rank 0, and no port weights",
        lambda c: [
            replace_argument(c, "learner-worker", "learner.node_rank=$(NODE_RANK)", "learner.node_rank=0"),
            container(c, "learner")["args"].extend(["--set", "learner.node_rank=1"]),
        ],
    ),
    "two learners": Planted(
        "cpu", "StatefulSet/learner spec.replicas", "the learner has 2 pods",
        lambda c: c.one("StatefulSet", "learner")["spec"].update(replicas=2),
    ),
}  # fmt: skip
