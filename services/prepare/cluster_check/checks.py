"""All checks of a set, and what comes of them."""

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from gspo_services.prepare.cluster_check import (
    agreement,
    endpoints,
    fields,
    health,
    monitoring,
    opened,
    redundancy,
    references,
    scheduling,
    schema,
    startup,
    traffic,
)
from gspo_services.prepare.cluster_check.model import ClusterFault, ClusterModel

Check: TypeAlias = Callable[[ClusterModel], Iterator[ClusterFault]]
CHECKS: Final[tuple[Check, ...]] = (
    fields.fields,
    schema.names, schema.templates, schema.updates, schema.config_maps, schema.volume_claims,
    references.pods, references.services,
    scheduling.places, scheduling.images, scheduling.host_ports, scheduling.shared_volumes,
    startup.commands, startup.variables, startup.configurations, startup.volumes,
    opened.paths, opened.code,
    agreement.runs, agreement.images, agreement.admission, agreement.users, agreement.queues, agreement.objects,
    endpoints.addresses,
    health.probes, health.stopping,
    traffic.policies, traffic.open_doors,
    redundancy.numbers, redundancy.node_ranks, redundancy.leaving, redundancy.priorities, redundancy.budgets,
    monitoring.monitors, monitoring.autoscalers,
)  # fmt: skip


def faults_of(cluster: ClusterModel) -> list[ClusterFault]:
    """Everything that is wrong with the set, each fault once, in the order of files and lines."""
    found: list[ClusterFault] = []
    for check in CHECKS:
        try:
            found += check(cluster)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            found.append(_unreadable(cluster, check, error))
    order = {id(manifest.item): place for place, manifest in enumerate(cluster.manifests)}
    once = {(id(fault.item), fault.way, fault.text): fault for fault in found}
    return sorted(
        once.values(), key=lambda fault: (order[id(fault.item)], cluster.manifest_of(fault.item).line_of(fault.way))
    )


def _unreadable(cluster: ClusterModel, check: Check, error: Exception) -> ClusterFault:
    """Some field has another type than Kubernetes gives it, so that this check does not get to its end."""
    return ClusterFault(
        item=cluster.objects[0],
        way=(),
        text=f"some object is not what Kubernetes takes; `{check.__name__}` cannot go on: {type(error).__name__} {error}",
        way_out="validate the manifests: kubectl apply --dry-run=server",
    )
