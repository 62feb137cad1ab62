"""What a refused process says about the release to update: the pod and the command, as the manifests have them."""

from pathlib import Path

import pytest
import yaml

from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Refused
from gspo_services.shared.net.welcome import WORKLOADS, update_advice

BASE = Path(__file__).parents[5] / "deploy" / "k8s" / "base"
OLDER, NEWER = PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1


def advice(version: int | None, role: str, other_role: str) -> str:
    return update_advice(Refused(reason="no", protocol_version=version), role, f"{role}-x7", other_role)


@pytest.mark.parametrize(
    ("role", "other_role", "version", "pod", "workload"),
    [
        ("rollout", "broker", OLDER, " this is the pod broker-0", "statefulset/broker broker"),
        ("rollout", "learner", OLDER, " this is the pod learner-0", "statefulset/learner learner"),
        ("rollout", "rollout", OLDER, "", "deployment/rollout rollout"),
        ("operator", "broker", OLDER, " this is the pod broker-0", "statefulset/broker broker"),
        ("rollout", "broker", NEWER, " this is the pod rollout-x7", "deployment/rollout rollout"),
        ("learner", "broker", NEWER, " this is the pod learner-0", "statefulset/learner learner"),
    ],
)
def test_the_older_end_is_the_one_to_update(role: str, other_role: str, version: int, pod: str, workload: str) -> None:
    said = advice(version, role, other_role)
    assert said.startswith(f". On Kubernetes{pod}: kubectl -n NAMESPACE set image {workload}=IMAGE, with the newer")


def test_a_command_that_is_older_than_the_broker_is_no_pod() -> None:
    assert advice(NEWER, "operator", "broker") == ". Run the gspo of the newer release in place of operator-x7"


def test_a_refusal_that_is_not_about_releases_gets_no_advice() -> None:
    assert advice(None, "rollout", "broker") == ""


@pytest.mark.parametrize("role", WORKLOADS)
def test_the_workloads_have_these_names_in_the_manifests(role: str) -> None:
    kind, _, name = WORKLOADS[role].partition("/")
    found = [each for each in yaml.safe_load_all((BASE / f"{role}.yaml").read_text()) if each["kind"].lower() == kind]
    (manifest,) = (each for each in found if each["metadata"]["name"] == name)
    assert manifest["spec"]["template"]["spec"]["containers"][0]["name"] == role
