"""Mistakes that people make, planted one at a time: each is found by the check that it belongs to."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cluster import CONFIG, Cluster, Object, render
from tests.deploy.conftest import copy_manifests
from tests.deploy.kustomizations import FILE, lost_patches
from tests.deploy.test_overlays import CHECKS

pytestmark = pytest.mark.deploy


@dataclass(frozen=True)
class Mistake:
    """``make`` puts it into a variant's objects; ``check`` finds it and says ``says``."""

    variant: str
    check: str
    says: str
    make: Callable[[Cluster], object]


def container(cluster: Cluster, role: str) -> Object:
    main: Object = cluster.role(role).template["spec"]["containers"][0]
    return main


def pod_spec(cluster: Cluster, role: str) -> Object:
    spec: Object = cluster.role(role).template["spec"]
    return spec


def volume(cluster: Cluster, role: str, name: str) -> Object:
    return next(found for found in pod_spec(cluster, role)["volumes"] if found["name"] == name)


def set_environment(cluster: Cluster, role: str, name: str, value: str) -> None:
    container(cluster, role).setdefault("env", []).append({"name": name, "value": value})


def edit_config(cluster: Cluster, old: str, new: str) -> None:
    assert old in cluster.config, old
    for item in cluster.of_kind("ConfigMap"):
        if CONFIG in item["data"]:
            item["data"][CONFIG] = item["data"][CONFIG].replace(old, new)


def secret(cluster: Cluster, start: str) -> Object:
    return next(item for item in cluster.of_kind("Secret") if item["metadata"]["name"].startswith(start))


def rename(mapping: dict[str, Any], old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def policy_rule(cluster: Cluster, name: str, direction: str, index: int) -> Object:
    rule: Object = cluster.one("NetworkPolicy", name)["spec"][direction][index]
    return rule


def replace_argument(cluster: Cluster, role: str, old: str, new: str) -> None:
    arguments = container(cluster, role)["args"]
    arguments[arguments.index(old)] = new


def edit_query(cluster: Cluster, old: str, new: str) -> None:
    metadata = cluster.one("ScaledObject", "rollout")["spec"]["triggers"][0]["metadata"]
    assert old in metadata["query"], old
    metadata["query"] = metadata["query"].replace(old, new)


def edit_rule(cluster: Cluster, old: str, new: str) -> None:
    groups = cluster.one("PrometheusRule", "gspo")["spec"]["groups"]
    (rules,) = (group["rules"] for group in groups if group["name"] == "gspo-autoscaling")
    assert any(old in rule["expr"] for rule in rules), old
    for rule in rules:
        rule["expr"] = rule["expr"].replace(old, new)


MISTAKES = {
    # schema
    "a field that does not exist": Mistake(
        "cpu", "schema", "containerPorts", lambda c: container(c, "broker").update(containerPorts=[])
    ),
    "a number as the value of a variable": Mistake(
        "cpu", "schema", "7001", lambda c: container(c, "broker")["env"].append({"name": "X", "value": 7001})
    ),
    "an unknown kind": Mistake(
        "cpu",
        "schema",
        "no schema",
        lambda c: c.objects.append({"apiVersion": "v2", "kind": "Pod", "metadata": {"name": "x", "namespace": "gspo"}}),
    ),
    "a wrong field of a custom resource": Mistake(
        "single-gpu-node-scaled",
        "schema",
        "minReplicas",
        lambda c: rename(c.one("ScaledObject", "rollout")["spec"], "minReplicaCount", "minReplicas"),
    ),
    "a wrong field in the template of a LeaderWorkerSet": Mistake(
        "qwen3-30b-a3b-lws",
        "schema",
        "tolerationSecond",
        lambda c: pod_spec(c, "learner")["tolerations"][0].update(tolerationSecond=1),
    ),
    # references
    "an object in the wrong namespace": Mistake(
        "cpu", "namespaces", "default", lambda c: c.one("Service", "broker")["metadata"].update(namespace="default")
    ),
    "an object that is there twice": Mistake(
        "cpu", "namespaces", "2 times", lambda c: c.objects.append(c.one("Service", "broker"))
    ),
    "a selector that does not fit its template": Mistake(
        "cpu",
        "selectors",
        "Deployment/rollout",
        lambda c: c.role("rollout").template["metadata"]["labels"].update({"app.kubernetes.io/component": "rollouts"}),
    ),
    "a Service that selects nothing": Mistake(
        "cpu",
        "selectors",
        "Service/broker",
        lambda c: c.one("Service", "broker")["spec"]["selector"].update({"app.kubernetes.io/component": "brokr"}),
    ),
    "two workloads that select the same pods": Mistake(
        "qwen3-30b-a3b",
        "selectors",
        "StatefulSet/learner",
        lambda c: c.role("learner-worker").template["metadata"]["labels"].update({"app.kubernetes.io/component": "learner"}),
    ),
    "a probe of a port that is not there": Mistake(
        "cpu", "ports", "telemetry", lambda c: container(c, "broker")["livenessProbe"]["httpGet"].update(port="telemetry")
    ),
    "a Service's port that is not the container's": Mistake(
        "cpu", "ports", "7011", lambda c: c.one("Service", "broker")["spec"]["ports"][0].update(port=7011)
    ),
    "a scrape of a port that is not there": Mistake(
        "cpu-monitored",
        "ports",
        "http-metrics",
        lambda c: c.one("PodMonitor", "gspo")["spec"]["podMetricsEndpoints"][0].update(port="http-metrics"),
    ),
    "a policy for a port that is not there": Mistake(
        "cpu", "ports", "wrk", lambda c: policy_rule(c, "broker", "ingress", 0)["ports"][0].update(port="wrk")
    ),
    "a mount without a volume": Mistake(
        "cpu",
        "volumes",
        "'cache'",
        lambda c: container(c, "rollout")["volumeMounts"].append({"name": "cache", "mountPath": "/cache"}),
    ),
    "a ConfigMap that is not there": Mistake(
        "cpu",
        "volumes",
        "no ConfigMap gspo-runs",
        lambda c: volume(c, "broker", "config")["configMap"].update(name="gspo-runs"),
    ),
    "a claim that is not there": Mistake(
        "single-gpu-node",
        "volumes",
        "no PersistentVolumeClaim models",
        lambda c: volume(c, "rollout", "model")["persistentVolumeClaim"].update(claimName="models"),
    ),
    "two nodes that write a claim of one": Mistake(
        "qwen3-30b-a3b",
        "shared_volumes",
        "learner-run",
        lambda c: c.one("PersistentVolumeClaim", "learner-run")["spec"].update(accessModes=["ReadWriteOnce"]),
    ),
    "a StatefulSet without its Service": Mistake(
        "cpu",
        "services_of_stateful_sets",
        "no Service brokers",
        lambda c: c.one("StatefulSet", "broker")["spec"].update(serviceName="brokers"),
    ),
    "a Service that hides pods that are not ready": Mistake(
        "cpu",
        "services_of_stateful_sets",
        "hides pods",
        lambda c: c.one("Service", "learner")["spec"].update(publishNotReadyAddresses=False),
    ),
    "an autoscaler of something that is not there": Mistake(
        "single-gpu-node-scaled",
        "scaling",
        "rollouts",
        lambda c: c.one("ScaledObject", "rollout")["spec"]["scaleTargetRef"].update(name="rollouts"),
    ),
    "a number of replicas beside an autoscaler": Mistake(
        "cpu-monitored", "scaling", "sets replicas", lambda c: c.one("Deployment", "rollout")["spec"].update(replicas=2)
    ),
    "a limit below its request": Mistake(
        "cpu", "resources", "memory requests", lambda c: container(c, "broker")["resources"]["limits"].update(memory="100Mi")
    ),
    "a quantity that is none": Mistake(
        "cpu", "resources", "2GB", lambda c: container(c, "broker")["resources"]["limits"].update(memory="2GB")
    ),
    "a priority class that is not there": Mistake(
        "cpu", "resources", "no PriorityClass", lambda c: pod_spec(c, "broker").update(priorityClassName="gspo-high")
    ),
    # pods
    "a container that may run as root": Mistake(
        "cpu",
        "restricted",
        "may run as root",
        lambda c: pod_spec(c, "learner")["securityContext"].update(runAsNonRoot=False),
    ),
    "an image without a version": Mistake(
        "cpu", "restricted", "gspo-cpu:latest", lambda c: container(c, "rollout").update(image="gspo-cpu:latest")
    ),
    "a capability": Mistake(
        "qwen3-30b-a3b-full",
        "restricted",
        "gain privileges",
        lambda c: container(c, "learner")["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    ),
    "a read-only root without a scratch directory": Mistake(
        "cpu",
        "writable",
        "/tmp",
        lambda c: container(c, "rollout").update(
            volumeMounts=[m for m in container(c, "rollout")["volumeMounts"] if m["mountPath"] != "/tmp"]
        ),
    ),
    "shared memory as large as all memory": Mistake(
        "single-gpu-node",
        "writable",
        "volume shm",
        lambda c: volume(c, "rollout", "shm")["emptyDir"].update(sizeLimit="96Gi"),
    ),
    "readiness asked where liveness is meant": Mistake(
        "cpu",
        "probes",
        "livenessProbe",
        lambda c: container(c, "learner")["livenessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "a startup probe that succeeds before SGLang has started": Mistake(
        "cpu", "probes", "before SGLang", lambda c: container(c, "rollout")["startupProbe"].pop("initialDelaySeconds")
    ),
    "a start that is killed before its timeout": Mistake(
        "single-gpu-node",
        "probes",
        "start_timeout_s",
        lambda c: edit_config(c, "start_timeout_s = 1800.0", "start_timeout_s = 3600.0"),
    ),
    "a drain longer than the grace period": Mistake(
        "single-gpu-node-scaled",
        "stopping",
        "25 s to stop in",
        lambda c: edit_config(c, "[rollout]\n", "[rollout]\ndrain_s = 30.0\n"),
    ),
    "a rollout that stays on a dead node": Mistake(
        "cpu",
        "disruption",
        "unreachable",
        lambda c: pod_spec(c, "rollout").update(tolerations=pod_spec(c, "rollout")["tolerations"][:1]),
    ),
    "a disruption budget that covers nothing of the learner": Mistake(
        "cpu",
        "disruption",
        "0 disruption budgets",
        lambda c: c.one("PodDisruptionBudget", "learner")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "trainer"}
        ),
    ),
    "no default policy": Mistake(
        "cpu", "network", "denies by default", lambda c: c.objects.remove(c.one("NetworkPolicy", "default-deny"))
    ),
    "a policy that leaves out the weights": Mistake(
        "cpu",
        "network",
        "rollout -> learner -> weights is needed",
        lambda c: c.one("NetworkPolicy", "rollout")["spec"]["egress"].pop(1),
    ),
    "a policy that lets rollouts at the batches": Mistake(
        "cpu",
        "network",
        "rollout -> broker -> batch is allowed and not needed",
        lambda c: [
            policy_rule(c, "broker", "ingress", 0)["ports"].append({"port": "batch"}),
            policy_rule(c, "rollout", "egress", 0)["ports"].append({"port": "batch"}),
        ],
    ),
    "rollouts that cannot reach each other's weights": Mistake(
        "single-gpu-node-scaled",
        "network",
        "rollout -> rollout -> peer-weights is needed",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "rollout-peers")),
    ),
    "weights for other rollouts on another port": Mistake(
        "single-gpu-node-scaled",
        "network",
        "weights for other rollouts at tcp://$(POD_IP):7004, of ports",
        lambda c: next(port for port in container(c, "rollout")["ports"] if port["name"] == "peer-weights").update(
            containerPort=7005
        ),
    ),
    "collectives that cannot leave the pod": Mistake(
        "qwen3-30b-a3b",
        "network",
        "learner-worker -> learner",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "learner-collectives")),
    ),
    "no DNS": Mistake("cpu", "network", "cannot ask DNS", lambda c: c.objects.remove(c.one("NetworkPolicy", "dns"))),
    "no way in for Prometheus": Mistake(
        "cpu-monitored", "network", "cannot be scraped", lambda c: c.objects.remove(c.one("NetworkPolicy", "metrics"))
    ),
    # program
    "a command that does not exist": Mistake(
        "cpu", "commands", "no command 'serve'", lambda c: replace_argument(c, "broker", "broker", "serve")
    ),
    "an argument that the process does not take": Mistake(
        "cpu", "commands", "--batch-size", lambda c: container(c, "learner")["args"].append("--batch-size=4")
    ),
    "an argument that torchrun does not take": Mistake(
        "qwen3-30b-a3b", "commands", "--nodes", lambda c: replace_argument(c, "learner-worker", "--nnodes=2", "--nodes=2")
    ),
    "an option that `gspo model` does not take": Mistake(
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
    "a variable that nobody sets": Mistake(
        "qwen3-30b-a3b",
        "commands",
        "$(RANK_OF_NODE)",
        lambda c: replace_argument(c, "learner-worker", "--node-rank=$(NODE_RANK)", "--node-rank=$(RANK_OF_NODE)"),
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
    "an endpoint open to others without keys": Mistake(
        "cpu", "settings", "without keys", lambda c: edit_config(c, "allow_plaintext = true", "allow_plaintext = false")
    ),
    "an address of the wrong Service": Mistake(
        "cpu",
        "endpoints",
        "no name of StatefulSet/broker",
        lambda c: edit_config(c, "tcp://broker:7001", "tcp://gspo-broker:7001"),
    ),
    "an address of the wrong port": Mistake(
        "cpu", "endpoints", "broker.batch_endpoint", lambda c: edit_config(c, "tcp://broker:7002", "tcp://broker:7001")
    ),
    "a process that binds loopback alone": Mistake(
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
    "a rendezvous with another pod": Mistake(
        "qwen3-30b-a3b",
        "endpoints",
        "trainer-0",
        lambda c: replace_argument(
            c, "learner-worker", "--master-addr=learner-0.learner", "--master-addr=trainer-0.learner"
        ),
    ),
    "a ledger that is lost with its pod": Mistake(
        "cpu", "directories", "is lost with the pod", lambda c: edit_config(c, "/var/lib/gspo/run", "/tmp/run")
    ),
    "a model that is not mounted": Mistake(
        "cpu", "directories", "/model/tiny", lambda c: edit_config(c, "/models/tiny", "/model/tiny")
    ),
    "a model that nobody downloads": Mistake(
        "single-gpu-node", "directories", "Qwen3-8b", lambda c: edit_config(c, 'Qwen3-8B"', 'Qwen3-8b"')
    ),
    "weights that are fetched to a disk": Mistake(
        "cpu",
        "directories",
        "no memory file system",
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
        "4 GPUs, learner.num_ranks is 8",
        lambda c: edit_config(c, "num_ranks = 4", "num_ranks = 8"),
    ),
    "more nodes than pods": Mistake(
        "qwen3-30b-a3b",
        "ranks",
        "--nnodes=4, and 2 pods",
        lambda c: replace_argument(c, "learner", "--nnodes=2", "--nnodes=4"),
    ),
    "two learners": Mistake(
        "cpu", "ranks", "a learner of its own", lambda c: c.one("StatefulSet", "learner")["spec"].update(replicas=2)
    ),
    "a metric that nobody exports": Mistake(
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
    "a query of what no rule records": Mistake(
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


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_by_its_check(name: str, cluster: Callable[[str], Cluster]) -> None:
    mistake = MISTAKES[name]
    objects = cluster(mistake.variant)
    check = CHECKS[mistake.check]
    assert list(check(objects)) == []
    mistake.make(objects)
    found = list(check(objects))
    assert any(mistake.says in finding for finding in found), found


def test_every_check_has_found_a_mistake() -> None:
    assert {mistake.check for mistake in MISTAKES.values()} == set(CHECKS)


def test_a_patch_without_a_target_is_found(tmp_path: Path) -> None:
    """kustomize itself says nothing."""
    k8s = copy_manifests(tmp_path)
    overlay = k8s / "overlays" / "cpu" / FILE
    content = yaml.safe_load(overlay.read_text())
    patch = {"patch": '[{"op": "remove", "path": "/spec/replicas"}]', "target": {"kind": "Deployment", "name": "rollouts"}}
    content["patches"].append(patch)
    overlay.write_text(yaml.safe_dump(content))
    (found,) = lost_patches(overlay.parent, render(overlay.parent))
    assert re.search(r"cpu: .*'rollouts'.* not there", found)
