"""What keeps a run alive beside others: one ledger, priorities, budgets of disruption, replicas."""

from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    PodTemplate,
    at,
    items_at,
    matches,
    namespace_of,
    number_at,
    process_container,
    process_of,
    settings_of,
    started,
    tolerates,
)
from gspo_services.prepare.cluster_check.references import KNOWN_CLASSES

CORE: Final = ("broker", "learner")
DEAD_NODE: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
USUAL_S: Final = 300.0
"""How long pods stay on a dead node that say nothing about it."""
MOST_S: Final = 60.0


def _process(pods: PodTemplate) -> str:
    container = process_container(pods)
    return "" if container is None else process_of(container)


def _has_database(pods: PodTemplate) -> bool:
    """Whether its pods keep their commits in a database, so that one of them leads and the others are its standbys."""
    container = process_container(pods)
    return container is not None and "GSPO_BROKER__DATABASE" in container.variables


def numbers(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """One broker without a database, as many pods of the learner as nodes, and rollouts whose number nothing sets back."""
    for pods in cluster.pods:
        process, way = _process(pods), ("spec", "replicas")
        if process == "broker" and pods.count != 1 and not ((pods.count or 1) > 1 and _has_database(pods)):
            text = f"{pods.count} brokers: each has a ledger of its own, and peers reach one or another by chance"
            way_out = "write replicas: 1; or let one of them lead (components/standby-broker)"
            yield ClusterFault(item=pods.owner, way=way, text=text, way_out=way_out)
        if process == "rollout" and at(pods.owner, "spec", "replicas") != {}:
            text = f"sets replicas to {pods.count}: every apply sets back what `kubectl scale` or an autoscaler chose"
            yield ClusterFault(
                item=pods.owner, way=way, text=text, way_out="remove replicas, and scale after the first apply"
            )
    learners = [pods for pods in cluster.pods if _process(pods) == "learner"]
    settings = next((found for pods in learners if (found := settings_of(cluster, pods))), None)
    made = sum(pods.count or 1 for pods in learners)
    if settings is not None and made != settings.learner.num_nodes:
        owner = learners[-1].owner
        yield ClusterFault(
            item=owner,
            way=("spec", "leaderWorkerTemplate", "size") if owner["kind"] == "LeaderWorkerSet" else ("spec", "replicas"),
            text=f"the learner has {made} pods, and learner.num_nodes is {settings.learner.num_nodes}",
            way_out="make them the same number",
        )
    for pods in learners:
        gpus = at(pods.main[0].data, "resources", "limits", "nvidia.com/gpu")
        if settings is not None and gpus and number_at({"n": int(gpus)}, "n", default=0) != settings.learner.num_ranks:
            yield ClusterFault(
                item=pods.owner,
                way=(*pods.main[0].way, "resources", "limits", "nvidia.com/gpu"),
                text=f"{gpus} GPUs, and learner.num_ranks, the ranks on each node, is {settings.learner.num_ranks}",
                way_out="make them the same number",
            )
    yield from _gpus_of_rollouts(cluster)


def node_ranks(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Each pod of a learner is another node, and the one that others meet is node 0."""
    found: dict[int, str] = {}
    for pods in cluster.pods:
        container = process_container(pods)
        for number in range(pods.count or 1) if container is not None and _process(pods) == "learner" else ():
            own, pod = started(cluster, pods, pods.first_index + number).settings, f"{pods.name}-{pods.first_index + number}"
            if container is None or own is None or own.learner.num_nodes < 2:
                continue
            rank = own.learner.node_rank
            if rank == 0 and not any("weights" in each.ports for each in pods.main):
                yield ClusterFault(
                    item=pods.owner, way=container.way,
                    text=f"pod {pod} has learner.node_rank 0, and no port weights, where rollouts fetch them",
                    way_out="let the pods that have that port be node 0",
                )  # fmt: skip
            if rank in found or not rank < own.learner.num_nodes:
                text = f"pod {pod} has learner.node_rank {rank}, " + (
                    f"as {found[rank]} has" if rank in found else f"and there are {own.learner.num_nodes} nodes"
                )
                yield ClusterFault(
                    item=pods.owner, way=(*container.way, "args"), text=text,
                    way_out="write --set learner.node_rank=$(NODE_RANK), with NODE_RANK from the pod's index",
                )  # fmt: skip
            found.setdefault(rank, pod)


def leaving(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Pods leave a node that is gone within a minute; Kubernetes' own five are a pause of the run."""
    for pods in cluster.pods:
        for taint in DEAD_NODE if _process(pods) else ():
            stays = [
                number_at(toleration, "tolerationSeconds", default=float("inf"))
                for toleration in items_at(pods.spec, "tolerations")
                if tolerates(toleration, {"key": taint, "effect": "NoExecute"})
            ]
            if max(stays, default=USUAL_S) > MOST_S:
                yield ClusterFault(
                    item=pods.owner, way=(*pods.way, "spec", "tolerations"), status="warn",
                    text=f"stays for minutes on a node that is gone ({taint})",
                    way_out=f"tolerate {{key: {taint}, operator: Exists, effect: NoExecute, tolerationSeconds: 60}}",
                )  # fmt: skip


def _gpus_of_rollouts(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """A server takes a GPU for each of its ranks, and no other process of a rollout uses any."""
    for pods in cluster.pods:
        settings = settings_of(cluster, pods) if _process(pods) == "rollout" else None
        gpus = at(pods.main[0].data, "resources", "limits", "nvidia.com/gpu")
        if settings is None or not gpus or int(gpus) == settings.rollout.ranks_per_server:
            continue
        rollout = settings.rollout
        yield ClusterFault(
            item=pods.owner,
            way=(*pods.main[0].way, "resources", "limits", "nvidia.com/gpu"),
            text=f"{gpus} GPUs, and its server has {rollout.ranks_per_server} ranks (rollout.tensor_parallel is "
            f"{rollout.tensor_parallel}, data_parallel {rollout.data_parallel})",
            way_out="make them the same number, in requests and limits",
        )


def priorities(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Where room is short, rollouts go first: broker and learner stop the whole run."""
    values = dict(KNOWN_CLASSES)
    for item in cluster.of_kind("PriorityClass"):
        values[str(at(item, "metadata", "name"))] = int(number_at(item, "value", default=0))
    by_pods = [(pods, values.get(at(pods.spec, "priorityClassName") or "", 0)) for pods in cluster.pods]
    rollouts = [value for pods, value in by_pods if _process(pods) == "rollout"]
    chosen = any(
        at(pods.spec, "priorityClassName") for pods, _ in by_pods
    )  # Else there are no classes, and nobody goes first.
    for pods, value in by_pods:
        if _process(pods) in CORE and chosen and rollouts and value <= max(rollouts):
            own = cluster.find("PriorityClass", at(pods.spec, "priorityClassName") or "")
            yield ClusterFault(
                item=pods.owner,
                way=(*pods.way, "spec", "priorityClassName"),
                text=f"priority {value}, and rollouts have {max(rollouts)}: a rollout that needs room can end the "
                f"{_process(pods)}, and with it the run" + (f" (PriorityClass/{own['metadata']['name']})" if own else ""),
                way_out="write gspo-core, and give that class the higher value",
            )


def budgets(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Drains move rollouts by themselves, and wait for a person with broker and learner."""
    found = cluster.of_kind("PodDisruptionBudget")
    for pods in cluster.pods:
        process = _process(pods)
        own = [
            item
            for item in found
            if namespace_of(item) == pods.namespace and matches(at(item, "spec", "selector"), pods.labels)
        ]
        if process and len(own) != 1:
            text = f"{len(own)} disruption budgets select its pods" + (": an eviction is refused" if own else "")
            way_out = "have one PodDisruptionBudget for each workload"
            yield ClusterFault(
                item=own[0] if own else pods.owner, way=("spec", "selector"), text=text, way_out=way_out,
                status="fail" if own or process != "rollout" else "warn",
            )  # fmt: skip
        for item in own:
            shut = str(at(item, "spec", "maxUnavailable")) in ("0", "0%") or str(at(item, "spec", "minAvailable")) == "100%"
            if shut and process == "rollout":
                yield ClusterFault(
                    item=item,
                    way=("spec", "maxUnavailable" if "maxUnavailable" in item["spec"] else "minAvailable"),
                    text="no rollout may ever be evicted: a drain of their nodes waits for ever",
                    way_out="write maxUnavailable: 25%; a rollout hands its work back",
                )
            if not shut and process in CORE:
                yield ClusterFault(
                    item=item, way=("spec",), text=f"a drain may end the {process} at any time: minutes for the run",
                    way_out="write maxUnavailable: 0, and delete the pod when you choose", status="warn",
                )  # fmt: skip
