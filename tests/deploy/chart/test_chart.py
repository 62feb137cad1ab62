"""What is in a Helm chart, rendered by Helm itself, as a library, without a cluster."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.helm.chart import ANNOTATION, chart_of
from deploy.helm.generate import write_chart
from deploy.helm.values import ValuesError
from tests.deploy.chart.installed import helm, installed
from tests.deploy.cluster import Object, render, walk

pytestmark = pytest.mark.deploy
Rendered = Callable[[str], tuple[Path, list[Object]]]


@pytest.fixture
def chart(rendered: Rendered, tmp_path: Path) -> Path:
    directory, _ = rendered("single-gpu-node-scaled")
    write_chart(chart_of(render(directory), "gspo", "0.1.0"), tmp_path / "gspo")
    return tmp_path / "gspo"


def test_helm_has_nothing_against_the_chart(chart: Path) -> None:
    report = helm().lint(chart)
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["total_charts_linted"] == 1


def test_no_secret_is_in_the_chart_and_its_notes_say_how_to_make_them(chart: Path, rendered: Rendered) -> None:
    secrets = [item for item in rendered("single-gpu-node-scaled")[1] if item["kind"] == "Secret"]
    texts = "".join(path.read_text() for path in sorted(chart.rglob("*")) if path.is_file())
    assert len(secrets) == 4
    assert [value for item in secrets for value in item["data"].values() if value in texts] == []
    notes = (chart / "templates" / "NOTES.txt").read_text()
    assert "create secret generic gspo-key-rollout --from-file=rollout.secret\n" in notes


def test_a_chart_is_written_over_an_older_one_and_over_nothing_else(chart: Path, tmp_path: Path) -> None:
    old = chart / "templates" / "secret-gspo-key-broker.yaml"
    old.write_text("key")
    write_chart({"Chart.yaml": "name: gspo\n", "templates/a.yaml": ""}, chart)
    assert [path.name for path in (chart / "templates").iterdir()] == ["a.yaml"]
    with pytest.raises(ValuesError, match="has files and is no chart: name another folder"):
        write_chart({}, tmp_path)


def test_a_second_release_is_a_run_in_its_own_namespace(chart: Path) -> None:
    found = installed(chart, "another")
    assert {item["metadata"]["namespace"] for item in found.values()} == {"another"}
    (query,) = (value for path, value in walk(found["ScaledObject/rollout"]) if path.endswith("/query"))
    assert query == 'max(gspo_rollouts_wanted{namespace="another"})'


def test_changed_files_restart_the_pods_that_read_them(rendered: Rendered, tmp_path: Path) -> None:
    write_chart(chart_of(render(rendered("own")[0]), "gspo", "0.1.0"), tmp_path / "gspo")

    def annotations(values: Object) -> dict[str, str]:
        found = installed(tmp_path / "gspo", "gspo", values)
        owners = {name: found[name]["spec"]["template"] for name in ("StatefulSet/broker", "StatefulSet/learner")}
        return {name: template["metadata"]["annotations"][ANNOTATION] for name, template in owners.items()}

    first, data, config = annotations({}), annotations({"data": {"train.jsonl": "{}"}}), annotations({"config": "[run]\n"})
    assert [name for name in first if data[name] != first[name]] == ["StatefulSet/broker"]
    assert [name for name in first if config[name] != first[name]] == ["StatefulSet/broker", "StatefulSet/learner"]


def test_braces_in_files_are_text_for_helm(rendered: Rendered, tmp_path: Path) -> None:
    objects = render(rendered("cpu")[0])
    config = '[run]\nnum_batches = 3 # {{ not a template }}\n"quoted" = "ü"\n'
    next(item for item in objects if item["kind"] == "Service")["metadata"]["annotations"] = {"a": '{{ "b" }}'}
    write_chart(chart_of(objects, "gspo", "0.1.0"), tmp_path / "gspo")
    found = installed(tmp_path / "gspo", "gspo", {"config": config})
    assert found["ConfigMap/gspo-run"]["data"]["run.toml"] == config
    assert '{{ \\"b\\" }}' in json.dumps(found)


def test_what_has_no_run_is_refused() -> None:
    with pytest.raises(ValuesError, match=r"0 ConfigMaps have run\.toml: render an overlay"):
        chart_of([], "gspo", "0.1.0")
