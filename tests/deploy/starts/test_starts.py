"""Every process of every overlay starts as its pod starts it. Minutes; ``make test-deploy``."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.prepare.cluster_check import ClusterModel, faults_of
from tests.deploy.cluster import Cluster, Object, Pods
from tests.deploy.conftest import GPU_OVERLAYS, VARIANTS, Pairs
from tests.deploy.starts.view import Start, start, start_other

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]
PROCESSES = {"broker": "broker", "rollout": "rollout", "learner": "learner", "learner-worker": "learner"}
WAITS = {"learner": "no answer from the broker", "learner-worker": "waiting for rank 0"}
"""What a /readyz says when all is opened and only a peer is missing."""
_before: dict[str, Start] = {}
"""Starts by all that they depend on: many overlays start a process alike."""


def key_of(cluster: Cluster, pods: Pods) -> str:
    """Two pods of one key start alike: probes' budgets, resources and places play no part."""
    main = {name: pods.main.get(name) for name in ("image", "command", "args", "env", "workingDir", "volumeMounts", "ports")}
    parts = (main, pods.spec["volumes"], pods.spec["securityContext"], pods.main["startupProbe"]["httpGet"], cluster.config)
    text = json.dumps([*parts, [each.get("args") for each in pods.spec.get("initContainers", [])]], sort_keys=True)
    return re.sub(r"registry\.example\.com/|sizeLimit\W+\w+", "", text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_process_starts_in_its_pods_view(variant: str, cluster: Callable[[str], Cluster], tmp_path: Path) -> None:
    require_starts(cluster(variant), tmp_path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_every_process_starts_with_every_pair_of_components(overlay: str, paired: Pairs, tmp_path: Path) -> None:
    for pair, (_, objects) in paired(overlay).items():
        require_starts(Cluster(objects), tmp_path / "-".join(pair))


def require_starts(objects: Cluster, directory: Path) -> None:
    for pods in objects.pods:
        if pods.role not in PROCESSES:
            continue
        key = key_of(objects, pods)
        if key not in _before:
            own = directory / pods.role
            own.mkdir(parents=True)
            standby = pods.role == "broker" and "GSPO_BROKER__DATABASE" in pods.environment
            event = "broker_started" if pods.role == "broker" and not standby else ""
            waits = "the database" if standby else WAITS.get(pods.role, "")
            if pods.role == "learner" and objects.settings(pods).learner.num_nodes > 1:
                # It asks the broker, and its first rank waits for those of the other nodes.
                event, waits = "connect_again", "starting"
            _before[key] = start(objects, pods, PROCESSES[pods.role], own, event=event, waits=waits)
        done = _before[key]
        assert done.started, f"{pods.name} ended with status {done.status}, /readyz {done.readyz!r}:\n{done.log}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_init_containers_do_their_work_in_their_pods_view(
    variant: str, cluster: Callable[[str], Cluster], tmp_path: Path
) -> None:
    objects = cluster(variant)
    for pods in objects.pods:
        for container in pods.spec.get("initContainers", []):
            key = re.sub(
                r"registry\.example\.com/", "", json.dumps([container, pods.spec["securityContext"]], sort_keys=True)
            )
            if key not in _before:
                directory = tmp_path / pods.role
                directory.mkdir()
                # A model takes a minute; it is whole at the end, which `make test-pods` waits for.
                event = "cold start: step" if container.get("args", [""])[0] == "model" else ""
                _before[key] = start_other(objects, pods, container, directory, event=event)
                if pods.role == "model-download":
                    given = {each["name"]: each.get("value") for each in container["env"]}
                    names = [str(given[name]).rpartition("/")[2] for name in ("MODEL", "DATASET") if given[name]]
                    assert sorted(path.name for path in (directory / "model").iterdir()) == sorted(names)
            done = _before[key]
            assert done.started, f"{pods.name} ended with status {done.status}:\n{done.log}"


def test_an_option_that_the_program_does_not_accept_is_refused_by_it(
    cluster: Callable[[str], Cluster], tmp_path: Path
) -> None:
    objects = cluster("cpu")
    rollout = objects.role("rollout")
    container = rollout.spec["initContainers"][0] | {"args": ["model", "tiny", "/models/tiny", "--if-absent"]}
    done = start_other(objects, rollout, container, tmp_path, event="cold start: step")
    assert (done.started, done.status) == (False, 2)
    assert "unrecognized arguments: --if-absent" in done.log


def test_a_rollout_of_another_site_starts_in_its_pods_view(site: list[Object], tmp_path: Path) -> None:
    objects = Cluster(site)
    (tmp_path / "pod").mkdir()
    done = start(objects, objects.role("rollout"), "rollout", tmp_path / "pod")
    assert done.started, done.log


def test_a_broker_without_its_data_set_ends_as_the_check_says(cluster: Callable[[str], Cluster], tmp_path: Path) -> None:
    objects = cluster("single-gpu-node")
    broker = objects.role("broker")
    broker.main["volumeMounts"][:] = [each for each in broker.main["volumeMounts"] if each["name"] != "model"]
    done = start(objects, broker, "broker", tmp_path)
    assert (done.started, done.status) == (False, 2)
    assert "there is no file /models/gsm8k/main/train-00000-of-00001.parquet" in done.log
    texts = [fault.text for fault in faults_of(ClusterModel.of(objects.objects))]
    assert any(
        "environment.options.train_path is, /models/gsm8k/main/train-00000-of-00001.parquet" in text for text in texts
    )
