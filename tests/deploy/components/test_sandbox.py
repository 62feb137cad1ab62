"""deploy/k8s/sandbox: servers of sandboxes in a namespace of their own, and the rollouts that use them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gspo_services.prepare.cluster_check.fields import OLDEST
from gspo_services.shared.settings import Settings, load_settings
from gspo_services.shared.settings.configuration import RESERVED
from gspo_services.tasks.sandbox.wire import KEY_VARIABLE
from tests.deploy.cluster import Cluster, Pods, matches, quantity, render
from tests.deploy.conftest import BY_HAND
from tests.deploy.kustomizations import FILE, lost_patches
from tests.deploy.played.faults import faults

pytestmark = pytest.mark.deploy
SET = "sandbox"


def with_gvisor(manifests: Path) -> Path:
    """A copy of the set with the components that its last lines offer."""
    directory = manifests / "sandbox-with-gvisor"
    if not directory.exists():
        shutil.copytree(manifests / SET, directory)
        text = (directory / FILE).read_text()
        (directory / FILE).write_text(text.replace("# components:\n", "components:\n").replace("\n#   - ", "\n  - "))
        offered = yaml.safe_load((directory / FILE).read_text())["components"]
        assert offered == ["../components/sandbox-gvisor", "../components/monitoring"]
    return directory


@pytest.fixture(params=["sandbox", "gvisor"])
def directory(request: pytest.FixtureRequest, manifests: Path) -> Path:
    return manifests / SET if request.param == "sandbox" else with_gvisor(manifests)


@pytest.fixture
def servers(directory: Path) -> Cluster:
    return Cluster(render(directory))


def one(servers: Cluster) -> Pods:
    (pods,) = servers.pods
    return pods


def own_settings(pods: Pods) -> Settings:
    return load_settings(None, environment={key: value for key, value in pods.environment.items() if value is not None})


def test_the_api_server_would_accept_it_and_its_parts_fit(servers: Cluster, directory: Path) -> None:
    # The set says that it needs a newer Kubernetes than the run's.
    key = BY_HAND["sandbox"] | {"metadata": {"name": "gspo-sandbox", "namespace": "gspo-sandbox"}}
    found = faults([*servers.objects, key])
    assert [fault.text for fault in found if f"Kubernetes {OLDEST}; " not in fault.text] == []
    assert list(lost_patches(directory, servers.objects)) == []
    names = {
        item["metadata"].get("namespace") for item in servers.objects if item["kind"] not in ("Namespace", "RuntimeClass")
    }
    assert names == {"gspo-sandbox"}


def test_a_server_listens_where_its_ports_are_and_has_a_key(servers: Cluster) -> None:
    pods = one(servers)
    section = own_settings(pods).sandbox
    assert (section.host, section.port, section.metrics_port) == ("0.0.0.0", pods.ports["sandboxes"], pods.ports["metrics"])
    assert own_settings(pods).security.metrics_host == "0.0.0.0"
    (key,) = (entry for entry in pods.main["env"] if entry["name"] == KEY_VARIABLE)
    assert key["valueFrom"]["secretKeyRef"] == {"name": "gspo-sandbox", "key": "key"}
    assert KEY_VARIABLE in RESERVED
    assert pods.main["args"] == ["sandbox"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pods.main[probe]["httpGet"]["port"] == "metrics"


def test_memory_and_time_are_enough(servers: Cluster) -> None:
    pods = one(servers)
    section = own_settings(pods).sandbox
    assert section.max_sandboxes == quantity(pods.main["resources"]["requests"]["cpu"])
    assert section.max_sandboxes * section.max_memory_bytes < quantity(pods.main["resources"]["limits"]["memory"])
    assert pods.spec["terminationGracePeriodSeconds"] >= section.drain_s + 10


def test_programs_have_no_right_on_the_node_and_no_network(servers: Cluster) -> None:
    pods = one(servers)
    spec, security, own = pods.spec, pods.spec["securityContext"], pods.main["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], spec["automountServiceAccountToken"]) == (True, 10001, False)
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    # A kernel of its own, or a user namespace of its own.
    assert spec.get("runtimeClassName") == "gvisor" or (spec["hostUsers"] is False and own["procMount"] == "Unmasked")
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in spec["volumes"])
    policies = [item["spec"] for item in servers.of_kind("NetworkPolicy")]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
    assert not any("egress" in policy for policy in policies)


def test_the_number_of_servers_is_the_autoscalers_alone(servers: Cluster) -> None:
    (scaler,) = servers.of_kind("HorizontalPodAutoscaler")
    target = servers.one("Deployment", scaler["spec"]["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"]
    assert 1 < scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]
    assert scaler["spec"]["metrics"][0]["resource"]["name"] in one(servers).main["resources"]["requests"]


def test_rollouts_and_servers_name_each_other(cluster: Callable[[str], Cluster], manifests: Path) -> None:
    run, servers = cluster("cpu-sandbox"), Cluster(render(manifests / SET))
    rollout, pods = run.role("rollout"), one(servers)
    (service,) = servers.of_kind("Service")
    urls = run.settings(rollout).sandbox.urls
    namespace = service["metadata"]["namespace"]
    assert urls == [f"http://{service['metadata']['name']}.{namespace}:{service['spec']['ports'][0]['port']}"]
    assert {entry["name"]: entry for entry in rollout.main["env"]}[KEY_VARIABLE] == {
        entry["name"]: entry for entry in pods.main["env"]
    }[KEY_VARIABLE]
    for policy, direction, side, other, where in (
        (run.one("NetworkPolicy", "sandbox"), "egress", "to", pods, namespace),
        (servers.one("NetworkPolicy", "sandbox"), "ingress", "from", rollout, "gspo"),
    ):
        (rule,) = policy["spec"][direction]
        (peer,) = rule[side]
        assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": where}}
        assert matches(peer["podSelector"], other.labels)
        assert {pods.ports.get(port["port"], port["port"]) for port in rule["ports"]} == {pods.ports["sandboxes"]}
    assert matches(run.one("NetworkPolicy", "sandbox")["spec"]["podSelector"], rollout.labels)
