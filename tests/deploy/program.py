"""Checks the manifests against the program: its arguments, settings, ports, keys, metrics."""

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH, WEIGHTS, WORK
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.cli.main import PROCESSES
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.shared.net.security import KEY_ROLES
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.arguments import add_configuration_arguments, parse_process_arguments
from gspo_services.shared.settings.configuration import ENVIRONMENT_PREFIX, RESERVED
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from tests.deploy.cluster import VARIABLE, Cluster, Pods, title, walk

METRIC = re.compile(r"(?<![\w:])(?:\w+:)*gspo_[a-z0-9_:]+")
LWS_VARIABLES = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")  # The controller sets them in every container.
KEYS_NEEDED = {
    "broker": {"broker.secret", *(f"{role}.public" for role in {*WORK.connects, *BATCH.connects})},
    "learner": {"learner.secret", "broker.public", *(f"{role}.public" for role in WEIGHTS.connects)},
    "rollout": {"rollout.secret", "broker.public", "learner.public"},
}
SERVICES = ("broker", "rollout", "learner")
LEARNERS = ("learner", "learner-worker")


def commands(cluster: Cluster) -> Iterator[str]:
    """Every container starts with arguments that the program accepts, on a file that is mounted there."""
    for pods in cluster.pods:
        for container in pods.containers:
            words = [*container.get("command", []), *container.get("args", [])]
            known = {entry["name"] for entry in container.get("env", [])}
            if pods.kind == "LeaderWorkerSet":
                known |= set(LWS_VARIABLES)
            for name in VARIABLE.findall(" ".join(words)):
                if name not in known:
                    yield f"{pods.name}: $({name}) is not in its environment"
            if words[:1] in (["sh"], ["sleep"]):
                continue
            problem = _objection(words)
            if problem:
                yield f"{pods.name}: {' '.join(words)}: {problem}"
            for word in words:
                if word.endswith(".toml") and not _is_config(cluster, pods, word):
                    yield f"{pods.name}: {word} is not mounted"
    names = cluster.role("rollout")
    unique = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    if names.main["args"][-2:] != ["--name", "$(POD_NAME)"] or unique not in names.main["env"]:
        yield f"{names.name}: two rollouts would have one name"


def _objection(words: Sequence[str]) -> str:
    """Why the program would not accept ``words``; empty when it would."""
    if words[0] == "model":
        return _model_objection(tuple(words))
    if words[0] not in PROCESSES:
        return f"no command {words[0]!r}; there are {', '.join(PROCESSES)}"
    return _process_objection(words[1:], named=words[0] != "broker")


def _process_objection(words: Sequence[str], *, named: bool = True) -> str:
    """The process's objection to these arguments; another check reads the file that they name."""
    if not named:
        parser = argparse.ArgumentParser()
        add_configuration_arguments(parser)
        return _parse(parser, words)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parse_process_arguments("gspo", "", "", words)
    except ConfigurationError:
        return ""
    except SystemExit:
        return _last_line(errors)
    return ""


@cache
def _model_objection(words: tuple[str, ...]) -> str:
    """The objection of ``gspo model ...`` itself, run on a directory that already holds a model."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text("{}")
        given = [directory if word.startswith("/models/") else word for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "gspo_services.cli.main", *given], capture_output=True, text=True, timeout=240
        )
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def _last_line(errors: io.StringIO) -> str:
    return errors.getvalue().strip().rpartition("\n")[2]


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parser.parse_args(list(words))
    except SystemExit:
        return _last_line(errors)
    return ""


def _is_config(cluster: Cluster, pods: Pods, path: str) -> bool:
    name = pods.mount(path).get("configMap", {}).get("name")
    config_map = cluster.find("ConfigMap", str(name))
    return config_map is not None and Path(path).name in config_map["data"]


def settings(cluster: Cluster) -> Iterator[str]:
    """Each process accepts the file with its environment and arguments, and reads everything in its environment."""
    for pods in cluster.pods:
        if pods.role not in (*SERVICES, "learner-worker"):
            continue
        for index in pods.indices:
            try:
                cluster.settings(pods, index)
            except ConfigurationError as error:
                yield f"{pods.name}: {error}"
        for name in pods.environment:
            if name.startswith(ENVIRONMENT_PREFIX) and "__" not in name and name not in RESERVED:
                yield f"{pods.name}: no process reads {name}; settings are GSPO_SECTION__KEY"


def endpoints(cluster: Cluster) -> Iterator[str]:
    """Processes connect to what is bound: the name of a Service or pod of the set, and the port of its container."""
    broker, learner = cluster.role("broker"), cluster.role("learner")
    common, bound = cluster.settings(), cluster.settings(broker)
    wanted = (
        ("broker.work_endpoint", common.broker.work_endpoint_of(0), bound.broker.work_endpoint, broker, "work"),
        ("broker.batch_endpoint", common.broker.batch_endpoint_of(0), bound.broker.batch_endpoint, broker, "batch"),
        ("learner.advertised_weights_endpoint", common.learner.advertised_weights_endpoint,
         cluster.settings(learner).learner.weights_endpoint, learner, "weights"),
    )  # fmt: skip
    for key, address, binding, pods, port in wanted:
        at = urlsplit(binding)
        for to in map(urlsplit, address.split(",")):
            if at.hostname != "0.0.0.0" or to.port != at.port or at.port != pods.ports.get(port):
                yield f"{key}: {address}, bound as {binding}, container port {port} is {pods.ports.get(port)}"
            if str(to.hostname) not in _names(cluster, pods):
                yield f"{key}: {to.hostname} is not a name of {pods.name}"
    for section, pods in (("broker", broker), ("learner", learner), ("rollout", cluster.role("rollout"))):
        port_number = getattr(cluster.settings(pods), section).metrics_port
        if pods.ports.get("metrics") != port_number or cluster.settings(pods).security.metrics_host != "0.0.0.0":
            yield f"{pods.name}: metrics are on {port_number}, but the container's port is {pods.ports.get('metrics')}"
    for pods in cluster.pods:
        if pods.role in LEARNERS and common.learner.num_nodes > 1:
            yield from _rendezvous(cluster, pods, learner)


def _rendezvous(cluster: Cluster, pods: Pods, learner: Pods) -> Iterator[str]:
    """Where a learner's nodes meet, and where nodes without metrics report that they are alive."""
    own = cluster.settings(pods).learner
    host, _, port = own.rendezvous_address.rpartition(":")
    if host not in _names(cluster, learner):
        yield f"{pods.name}: learner.rendezvous_address: {host} is not a name of {learner.name}"
    if int(port) != learner.ports.get("rendezvous"):
        yield f"{pods.name}: learner.rendezvous_address is on {port}, but rank 0 has {learner.ports.get('rendezvous')}"
    if pods.role == "learner-worker" and pods.ports.get("health") != own.metrics_port:
        yield f"{pods.name}: its health is on {own.metrics_port}, but the container's port is {pods.ports.get('health')}"


def _names(cluster: Cluster, pods: Pods) -> list[str]:
    """DNS names inside its namespace: its headless Service, and the first pod under that name, or every broker's."""
    owner = pods.owner["metadata"]["name"]
    service = pods.owner["spec"].get("serviceName", owner)
    indices = pods.indices if pods.role == "broker" else [0]
    names = [service, *(f"{owner}-{index}.{service}" for index in indices)]
    return names if cluster.find("Service", service) else []


def directories(cluster: Cluster) -> Iterator[str]:
    """Lasting data is on a claim, the model is mounted, and weights are fetched into memory."""
    for pods in cluster.pods:
        if pods.role not in (*SERVICES, "learner-worker"):
            continue
        own = cluster.settings(pods)
        run = pods.mount(str(own.run.directory))
        if pods.role != "rollout" and not {"persistentVolumeClaim", "volumeClaimTemplate"} & set(run):
            yield f"{pods.name}: run.directory {own.run.directory} is lost with the pod"
        if pods.role != "broker" and not pods.mount(str(own.model.path)):
            yield f"{pods.name}: nothing is mounted where model.path is, {own.model.path}"
        weights = pods.mount(str(own.rollout.weights_directory)).get("emptyDir", {})
        if pods.role == "rollout" and weights.get("medium") != "Memory":
            yield f"{pods.name}: rollout.weights_directory {own.rollout.weights_directory} is not a memory file system"
    download = cluster.find("Deployment", "model-download")
    if download is not None:
        (pods,) = (pods for pods in cluster.pods if pods.owner is download)
        given = {entry["name"]: entry.get("value") for entry in pods.containers[0]["env"]}
        there = {f"/models/{str(given[name]).rpartition('/')[2]}" for name in ("MODEL", "DATASET")}
        options = cluster.settings().environment.options
        used = [
            str(cluster.settings().model.path),
            *(str(options[key]) for key in ("train_path", "eval_path") if key in options),
        ]
        for path in used:
            if path.startswith("/models/") and not any(path == root or path.startswith(f"{root}/") for root in there):
                yield f"model-download does not download {path}, only {sorted(there)}"


def keys(cluster: Cluster) -> Iterator[str]:
    """With keys, each process has its own secret key, the public keys that it needs, and no other secret key."""
    for role in SERVICES:
        pods = cluster.role(role)
        directory = cluster.settings(pods).security.keys
        if not directory:
            continue
        sources = pods.mount(directory).get("projected", {}).get("sources", [])
        secrets = [cluster.find("Secret", source["secret"]["name"]) for source in sources]
        files = {name for secret in secrets if secret for name in secret["data"]}
        for name in sorted(KEYS_NEEDED[role] - files):
            yield f"{pods.name}: {directory} has no {name}"
        for name in sorted(files):
            if Path(name).stem.split("-")[0] not in KEY_ROLES:
                yield f"{pods.name}: {name} is not a key that `gspo keys` makes"
            given = {f"{role}.secret"} | ({"operator.secret"} if role == "broker" else set())
            if name.endswith(".secret") and name not in given:
                yield f"{pods.name}: holds {name}, which is not its own"
        mode = pods.mount(directory).get("projected", {}).get("defaultMode", 0o644)
        if files and mode & 0o007:
            yield f"{pods.name}: everybody can read the keys ({mode:o})"


def ranks(cluster: Cluster) -> Iterator[str]:
    """Each node has as many ranks as GPUs, and each pod is one node."""
    learner = cluster.settings().learner
    learners = [pods for pods in cluster.pods if pods.role in LEARNERS]
    for pods in learners:
        gpus = pods.main["resources"]["limits"].get("nvidia.com/gpu")
        if gpus is not None and int(gpus) != learner.num_ranks:
            yield f"{pods.name}: {gpus} GPUs, but learner.num_ranks is {learner.num_ranks}"
    num_pods = sum(len(pods.indices) for pods in learners)
    if num_pods != learner.num_nodes:
        yield f"learner.num_nodes is {learner.num_nodes}, but there are {num_pods} pods"
        return
    nodes = {pods.name: [cluster.settings(pods, index).learner.node_rank for index in pods.indices] for pods in learners}
    if sorted(node for numbers in nodes.values() for node in numbers) != list(range(learner.num_nodes)):
        yield f"learner.node_rank is {nodes}: not each node once"
    if 0 not in nodes[cluster.role("learner").name]:
        yield f"learner.node_rank is {nodes}: rollouts fetch the weights from {cluster.role('learner').name}"


@cache
def metric_names() -> frozenset[str]:
    """Every sample name that the processes export."""
    names: set[str] = set()
    makers: tuple[Callable[[CollectorRegistry], object], ...]
    makers = (BrokerMetrics, LearnerMetrics, RolloutMetrics, SandboxMetrics)
    for make in makers:
        registry = CollectorRegistry()
        make(registry)
        for family in registry.collect():
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {family.name + suffix for suffix in suffixes}
    return frozenset(names)


def metrics(cluster: Cluster) -> Iterator[str]:
    """Every metric in a query is exported by a process or recorded by a rule of the set."""
    asking = cluster.of_kind("PrometheusRule", "ScaledObject", "HorizontalPodAutoscaler")
    recorded = {value for item in asking for path, value in walk(item) if path.endswith("/record")}
    for item in asking:
        for path, value in walk(item["spec"]):
            if not path.endswith(("/expr", "/query", "/metric/name")) or not isinstance(value, str):
                continue
            for name in sorted(set(METRIC.findall(value)) - metric_names() - recorded):
                yield f"{title(item)}: no process exports {name}"


CHECKS = (commands, settings, endpoints, directories, keys, ranks, metrics)
