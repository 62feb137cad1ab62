"""What a mistake is, and the small changes to rendered manifests that make one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.deploy.cluster import CONFIG, Cluster, Object


@dataclass(frozen=True)
class Planted:
    """One mistake: ``make`` puts it into a variant's objects; the fault is in ``place``, its text has ``says``."""

    variant: str
    place: str
    """Object and field, as a fault names them."""
    says: str
    make: Callable[[Cluster], object]


POD = "spec.template.spec"
MAIN = f"{POD}.containers[0]"


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
