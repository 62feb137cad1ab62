"""What the objects of one set must have in common, and some have not: settings, images, users, queues."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    PodTemplate,
    at,
    is_ours,
    items_at,
    name_of,
    namespace_of,
    process_container,
    process_of,
    settings_of,
    title_of,
)
from gspo_services.shared.settings import run_fingerprint

QUEUE: Final = "kueue.x-k8s.io/queue-name"
PLACEHOLDER: Final = "registry.example.com"
LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def runs(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """All processes of a run have the settings that its broker asks for."""
    found = {}
    for pods in cluster.pods:
        container, settings = process_container(pods), settings_of(cluster, pods)
        if container is not None and settings is not None:
            found[pods.name] = (pods, process_of(container), run_fingerprint(settings))
    brokers = {print_ for _, process, print_ in found.values() if process == "broker"}
    for pods, process, own in found.values():
        if process == "rollout" and brokers and own not in brokers:
            yield ClusterFault(
                item=pods.owner, way=(*pods.way, "spec"),
                text=f"{pods.kind}/{pods.name} has other settings of the run than the broker (model, environment, reward, "
                "batch or seed): the broker refuses it",
                way_out="give both the same run.toml, and let variables and --set change only addresses and paths",
            )  # fmt: skip


def images(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Images are of one release, of a registry that is there, and all of them can be pulled."""
    ours = [container for container in cluster.containers if is_ours(container)]
    tags = Counter(str(container.data["image"]).partition("@")[0].rpartition("/")[2].partition(":")[2] for container in ours)
    usual = tags.most_common(1)[0][0] if tags else ""
    secrets = {_registry(each.data["image"]): each.pods for each in ours if items_at(each.pods.spec, "imagePullSecrets")}
    unnamed = [each for each in ours if str(each.data["image"]).startswith(f"{PLACEHOLDER}/")]
    if unnamed:
        text = f"{len(unnamed)} images are of {PLACEHOLDER}, which stands for your registry: no node can pull them"
        yield ClusterFault(
            item=unnamed[0].pods.owner, way=(*unnamed[0].way, "image"), text=text, status="warn",
            way_out="write your registry into images: of the kustomization",
        )  # fmt: skip
    for container in ours:
        image = str(container.data["image"])
        item, way = container.pods.owner, (*container.way, "image")
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        if tag != usual and "@" not in image:
            text = f"{image} has the tag {tag or 'latest'!r}, and the others have {usual!r}: two releases in one run"
            yield ClusterFault(item=item, way=way, text=text, way_out="name one tag for all images", status="warn")
        other = secrets.get(_registry(image))
        if other is not None and not items_at(container.pods.spec, "imagePullSecrets"):
            text = f"has no imagePullSecrets, and {other.kind}/{other.name} has them for the same registry: ImagePullBackOff"
            way_out = "put the component private-registry behind all components that add pods"
            yield ClusterFault(item=item, way=(*container.pods.way, "spec"), text=text, way_out=way_out)


def _registry(image: object) -> str:
    return str(image).rpartition("/")[0]


def users(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Where the cluster chooses users (OpenShift), it does for all pods."""
    fixed = [pods for pods in cluster.pods if _fixes_user(pods)]
    free = [pods for pods in cluster.pods if not _fixes_user(pods)]
    if not fixed or not free or len(free) < len(cluster.pods) / 2:
        return
    for pods in fixed:
        yield ClusterFault(
            item=pods.owner, way=(*pods.way, "spec", "securityContext"),
            text=f"fixes its user or group, and {len(free)} other kinds of pods leave them to the cluster: OpenShift "
            "refuses it",
            way_out="put the component openshift behind all components that add pods",
        )  # fmt: skip


def _fixes_user(pods: PodTemplate) -> bool:
    return bool({"runAsUser", "fsGroup"} & set(at(pods.spec, "securityContext")))


def admission(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Pods meet the Pod Security Standard that their namespace enforces."""
    for pods in cluster.pods:
        namespace = cluster.find("Namespace", pods.namespace)
        if at(namespace, "metadata", "labels", "pod-security.kubernetes.io/enforce") != "restricted":
            continue
        for container in pods.containers:
            own = at(container.data, "securityContext")
            security = {**at(pods.spec, "securityContext"), **own}
            capabilities = at(own, "capabilities")
            wrong = {
                "runAsNonRoot: true": security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0,
                "allowPrivilegeEscalation: false": own.get("allowPrivilegeEscalation") is not False,
                "capabilities: {drop: [ALL]}": items_at(capabilities, "drop") != ["ALL"]
                or bool(items_at(capabilities, "add")),
                "seccompProfile: {type: RuntimeDefault}": at(security, "seccompProfile", "type") == {},
                "privileged: false": bool(own.get("privileged")),
                **{f"{name}: false": bool(pods.spec.get(name)) for name in ("hostNetwork", "hostPID", "hostIPC")},
                "volumes other than hostPath": any("hostPath" in each for each in items_at(pods.spec, "volumes")),
            }
            if missing := [name for name, is_wrong in wrong.items() if is_wrong]:
                yield ClusterFault(
                    item=pods.owner, way=(*container.way, "securityContext"),
                    text=f"the namespace {pods.namespace} enforces the restricted standard, and {container.name} has not "
                    f"{', '.join(missing)}: not one pod is made",
                    way_out=f"write {', '.join(missing)}, and no capability beside NET_BIND_SERVICE",
                )  # fmt: skip


def queues(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """With a queue, every pod of the learner waits in it, and all of them together."""
    if not cluster.of_kind("LocalQueue"):
        return
    learners = [pods for pods in cluster.pods if (one := process_container(pods)) and process_of(one) == "learner"]
    owners = {id(pods.owner): pods.owner for pods in learners}
    for owner in owners.values():
        queue = at(owner, "metadata", "labels", QUEUE)
        if not queue or not cluster.find("LocalQueue", str(queue), namespace_of(owner)):
            yield ClusterFault(
                item=owner, way=("metadata", "labels"),
                text=f"is in no queue of {namespace_of(owner)}: it takes its GPUs at once, and Kueue does not count them",
                way_out="put the component kueue behind those that add pods of the learner",
            )  # fmt: skip
    names = ", ".join(title_of(owner) for owner in owners.values())
    if len(owners) > 1:
        yield ClusterFault(
            item=learners[0].owner, way=("metadata", "labels"), status="warn",
            text=f"Kueue admits {names} one by one: two runs can each hold half of their GPUs and wait for ever",
            way_out="use learner-lws in place of learner-nodes",
        )  # fmt: skip


def objects(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Names and owners that the API server refuses, or that fight each other."""
    scaled: dict[tuple[str, str], str] = {}
    for item in cluster.objects:
        namespace = name_of(item) if item.get("kind") == "Namespace" else namespace_of(item)
        if not LABEL.fullmatch(namespace):
            text = f"{namespace!r} is no name of a namespace: small letters, digits and dashes, at most 63"
            yield ClusterFault(item=item, way=("metadata",), text=text, way_out="write another name into namespace:")
        if item.get("kind") in ("HorizontalPodAutoscaler", "ScaledObject"):
            reference = at(item, "spec", "scaleTargetRef")
            target = (namespace_of(item), f"{reference.get('kind', 'Deployment')}/{reference.get('name')}")
            if target in scaled:
                text = f"scales {target[1]}, as {scaled[target]} does: each undoes what the other has decided"
                yield ClusterFault(item=item, way=("spec", "scaleTargetRef"), text=text, way_out="keep one of them")
            scaled[target] = title_of(item)
