"""The Prometheus that ``make monitor`` starts: what it scrapes and loads, and what it says when it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.monitoring.generate import RULES
from deploy.monitoring.monitor import command, targets, write_configuration
from gspo_services.shared.settings.configuration import load_settings
from tests.monitoring.server import sped_up
from tests.support.processes.run_process import REPOSITORY

DEMO = REPOSITORY / "examples/arithmetic.toml"


def test_it_scrapes_each_process_of_the_run_under_the_labels_that_the_rules_use() -> None:
    settings = load_settings(DEMO, ["rollout.num_servers=3", "rollout.metrics_port=9200", "learner.metrics_port=9103"])
    found = {entry["labels"]["pod"]: (entry["labels"]["component"], entry["targets"]) for entry in targets(settings)}
    assert found == {
        "broker": ("broker", ["127.0.0.1:9101"]),
        "learner": ("learner", ["127.0.0.1:9103"]),
        "rollout-0": ("rollout", ["127.0.0.1:9200"]),
        "rollout-1": ("rollout", ["127.0.0.1:9201"]),
        "rollout-2": ("rollout", ["127.0.0.1:9202"]),
    }


def test_its_configuration_names_existing_files_from_wherever_it_is_started(tmp_path: Path) -> None:
    config = json.loads(write_configuration(tmp_path / "new", load_settings(DEMO)).read_text())
    assert [Path(path) for path in config["rule_files"]] == sorted(RULES.resolve().glob("*.yaml"))
    (file,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert Path(file).is_absolute()
    assert json.loads(Path(file).read_text()) == targets(load_settings(DEMO))
    assert config["global"]["scrape_timeout"] == config["global"]["scrape_interval"] == "5s"


def test_it_answers_only_on_this_host_and_serves_the_page() -> None:
    words = command("prometheus", Path("c"), Path("d"), "127.0.0.1:9090")
    assert "--web.listen-address=127.0.0.1:9090" in words
    (consoles,) = [word.partition("=")[2] for word in words if word.startswith("--web.console.templates=")]
    assert (Path(consoles) / "gspo.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "path", "message"),
    [
        ([str(DEMO)], "/nowhere", "prometheus is not on the PATH: apt-get install prometheus"),
        (["nothing.toml"], "/nowhere", "nothing.toml"),
        (
            [str(DEMO), "--set", "rollout.metrics_port=0"],
            "",
            "a metrics_port is 0 (any free port), which Prometheus cannot find",
        ),
    ],
)
def test_an_error_names_the_way_out(arguments: list[str], path: str, message: str, tmp_path: Path) -> None:
    program = tmp_path / "prometheus"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    said = subprocess.run(
        [sys.executable, "-m", "deploy.monitoring.monitor", *arguments, "--data", str(tmp_path / "data")],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path or str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert said.returncode == 1
    assert message in said.stderr
    assert not (tmp_path / "data").exists()


def test_sped_up_rules_are_the_same_rules() -> None:
    for path in sorted(RULES.glob("*.yaml"), reverse=True):
        before, after = yaml.safe_load(path.read_text()), yaml.safe_load(sped_up(path.read_text()))
        names = [[rule.get("alert", rule.get("record")) for rule in group["rules"]] for group in before["groups"]]
        assert names == [[rule.get("alert", rule.get("record")) for rule in group["rules"]] for group in after["groups"]]
    waits = [rule["for"] for group in after["groups"] for rule in group["rules"] if "for" in rule]
    assert all(int(wait.removesuffix("s")) <= 8 for wait in waits)
