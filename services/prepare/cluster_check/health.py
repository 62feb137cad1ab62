"""Probes against known times of starting, working and stopping."""

import re
from collections.abc import Iterator
from typing import Any, Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    ContainerSpec,
    PodTemplate,
    at,
    number_at,
    process_container,
    process_of,
    settings_of,
)
from gspo_services.shared.runtime.telemetry import LOOP_STALL_S
from gspo_services.shared.settings import Settings

START_S: Final = {"broker": 60.0, "learner": 60.0}
"""What the first answer of a process may take on a busy machine, and of a broker reading a ledger of some days."""
READY_DELAY_S: Final = 300.0
RANKS_STOP_S: Final = 590.0
"""What `gspo learner` gives its ranks to end the batch and save."""
STOP_S: Final = {"broker": 10.0, "learner": RANKS_STOP_S + 30.0}
SLEEP: Final = re.compile(r"sleep\D{1,6}(\d+(?:\.\d+)?)")


def probes(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Probes wait as long as a start may take, and restart only what hangs."""
    for pods in cluster.pods:
        container, settings = process_container(pods), settings_of(cluster, pods)
        if container is not None:
            yield from _start(container, settings)
            yield from _liveness(container)
            yield from _readiness(container)
            if settings is not None and settings.learner.node_rank and at(container.data, "readinessProbe"):
                text = "is ready only when all nodes are: a rolling update would wait for pods that wait for the update"
                yield ClusterFault(
                    item=pods.owner, way=(*container.way, "readinessProbe"), text=text,
                    way_out="leave it out: nothing connects to this node",
                )  # fmt: skip


def _budget(probe: Any) -> float:
    """Seconds until a probe that never succeeds has the container ended."""
    return number_at(probe, "initialDelaySeconds", default=0) + number_at(probe, "periodSeconds", default=10) * number_at(
        probe, "failureThreshold", default=3
    )


def _start(container: ContainerSpec, settings: Settings | None) -> Iterator[ClusterFault]:
    item, way, process = container.pods.owner, (*container.way, "startupProbe"), process_of(container)
    probe = at(container.data, "startupProbe")
    if not probe:
        text = "no startupProbe: the liveness probe counts from the first second, and ends a process that still loads"
        yield ClusterFault(item=item, way=way, text=text, way_out="add a startupProbe with a large failureThreshold")
        return
    needed = START_S.get(process, 0.0)
    if process == "rollout" and settings is not None:
        needed = settings.rollout.start_timeout_s
        if at(probe, "httpGet", "path") != "/startupz":
            text = f"asks {at(probe, 'httpGet', 'path')!r}, which says nothing about SGLang: it loads its model for minutes"
            yield ClusterFault(item=item, way=(*way, "httpGet", "path"), text=text, way_out="ask /startupz")
    if "GSPO_BROKER__DATABASE" in container.variables and at(probe, "httpGet", "path") == "/readyz":
        text = "asks /readyz, and a broker that waits to lead is not ready: the standby would be ended again and again"
        yield ClusterFault(item=item, way=(*way, "httpGet", "path"), text=text, way_out="ask /startupz")
    if _budget(probe) <= needed:
        yield ClusterFault(
            item=item,
            way=(*way, "failureThreshold"),
            text=f"the container is ended after {_budget(probe):.0f} s, and a start may take {needed:.0f} s"
            + (" (rollout.start_timeout_s)" if process == "rollout" else ""),
            way_out=f"write failureThreshold: {needed / number_at(probe, 'periodSeconds', default=10) * 1.1 + 1:.0f}",
        )


def _liveness(container: ContainerSpec) -> Iterator[ClusterFault]:
    item, way, probe = container.pods.owner, (*container.way, "livenessProbe"), at(container.data, "livenessProbe")
    if not probe:
        yield ClusterFault(
            item=item, way=way, text="no livenessProbe: a process that hangs is never started again", way_out="ask /healthz",
            status="warn",
        )  # fmt: skip
        return
    if at(probe, "httpGet", "path") == "/readyz":
        text = "ends a process that waits, for a full disk or an absent broker, and would go on by itself"
        yield ClusterFault(item=item, way=(*way, "httpGet", "path"), text=text, way_out="ask /healthz")
    if _budget(probe) < LOOP_STALL_S:
        text = (
            f"ends a process after {_budget(probe):.0f} s without an answer; {LOOP_STALL_S:.0f} s are no sign that it hangs"
        )
        yield ClusterFault(item=item, way=way, text=text, way_out="write periodSeconds: 15 and failureThreshold: 4")


def _readiness(container: ContainerSpec) -> Iterator[ClusterFault]:
    probe = at(container.data, "readinessProbe")
    delay_s = number_at(probe, "initialDelaySeconds", default=0) + number_at(probe, "periodSeconds", default=10)
    if delay_s > READY_DELAY_S:
        yield ClusterFault(
            item=container.pods.owner,
            way=(*container.way, "readinessProbe", "initialDelaySeconds"),
            text=f"it counts as ready after {delay_s:.0f} s at the earliest: updates and drains wait for that with each pod",
            way_out="remove initialDelaySeconds: the startup probe waits for the start",
        )


def stopping(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """The time to stop in is longer than what is done in it."""
    for pods in cluster.pods:
        grace_s = number_at(pods.spec, "terminationGracePeriodSeconds", default=30)
        for container in pods.main:
            before_s = _pre_stop_s(container)
            if before_s >= grace_s:
                yield ClusterFault(
                    item=pods.owner,
                    way=(*container.way, "lifecycle", "preStop"),
                    text=f"waits {before_s:.0f} s, and the pod is killed after {grace_s:.0f} s: its process gets no time to "
                    "hand back or save anything",
                    way_out="remove preStop: nothing is routed to these pods, they ask for their work",
                )
        yield from _time_to_stop(cluster, pods, grace_s)


def _pre_stop_s(container: ContainerSpec) -> float:
    hook = at(container.data, "lifecycle", "preStop")
    slept = SLEEP.search(" ".join(map(str, at(hook, "exec", "command") or [])))
    return float(slept[1]) if slept else number_at(hook, "sleep", "seconds", default=0)


def _time_to_stop(cluster: ClusterModel, pods: PodTemplate, grace_s: float) -> Iterator[ClusterFault]:
    container, settings = process_container(pods), settings_of(cluster, pods)
    if container is None or settings is None:
        return
    process = process_of(container)
    needed = STOP_S.get(process, settings.rollout.drain_s + 10.0) + _pre_stop_s(container)
    if grace_s < needed:
        yield ClusterFault(
            item=pods.owner,
            way=(*pods.way, "spec", "terminationGracePeriodSeconds"),
            text=f"{grace_s:.0f} s to stop in, and `gspo {process}` may take {needed:.0f} s: it would be killed",
            way_out=f"write {needed:.0f} or more",
        )
