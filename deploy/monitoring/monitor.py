"""A Prometheus for the runs of this machine: `python -m deploy.monitoring.monitor examples/arithmetic.toml`.

It scrapes the ports that the configuration names, checks the rules, and serves the page at /consoles/gspo.html. Start it
before the run, during it, or keep it: what is not there is scraped again until it is.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, load_settings

HERE: Final = Path(__file__).parent
SCRAPE_S: Final = 5


def targets(settings: Settings) -> list[dict[str, Any]]:
    """The processes of `gspo run`, with the labels that a pod's target has on Kubernetes."""
    ports = {"broker": ("broker", settings.broker.metrics_port), "learner": ("learner", settings.learner.metrics_port)}
    for index in range(settings.rollout.num_servers):
        ports[f"rollout-{index}"] = ("rollout", settings.rollout.metrics_port + index)
    return [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"component": component, "pod": name}}
        for name, (component, port) in ports.items()
    ]


def configuration(targets_file: Path, rules: Sequence[Path], scrape_s: int = SCRAPE_S) -> dict[str, Any]:
    """prometheus.yml."""
    every = f"{scrape_s}s"
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [{"job_name": "gspo", "file_sd_configs": [{"files": [str(targets_file.resolve())]}]}],
    }


def write_configuration(
    directory: Path, settings: Settings, rules: Sequence[Path] | None = None, scrape_s: int = SCRAPE_S
) -> Path:
    """prometheus.yml and the targets, as JSON, which is YAML. ``rules``: those of the repository unless given."""
    directory.mkdir(parents=True, exist_ok=True)
    targets_file = directory / "targets.json"
    targets_file.write_text(json.dumps(targets(settings), indent=2) + "\n")
    rules = sorted((HERE / "rules").glob("*.yaml")) if rules is None else rules
    path = directory / "prometheus.yml"
    path.write_text(json.dumps(configuration(targets_file, rules, scrape_s), indent=2) + "\n")
    return path


def command(program: str, config: Path, data: Path, address: str) -> list[str]:
    """The command line of Prometheus."""
    return [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=7d",
        f"--web.listen-address={address}",
        f"--web.console.templates={HERE / 'consoles'}",
        f"--web.console.libraries={HERE / 'consoles'}",
        "--log.level=warn",
    ]


def main() -> int:
    """Become Prometheus. Returns the exit status where that fails."""
    parser = argparse.ArgumentParser(prog="python -m deploy.monitoring.monitor", description=__doc__)
    parser.add_argument("config", type=Path, help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting, as in gspo run")
    parser.add_argument("--address", default="127.0.0.1:9090", help="where Prometheus answers (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("runs/prometheus"), help="its files (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        settings = load_settings(arguments.config, arguments.set)
    except ConfigurationError as error:
        return _fail(str(error))
    program = shutil.which("prometheus")
    if program is None:
        return _fail("prometheus is not on the PATH: apt-get install prometheus, or https://prometheus.io/download")
    if 0 in (settings.broker.metrics_port, settings.learner.metrics_port, settings.rollout.metrics_port):
        return _fail("a metrics_port is 0 (any free port), which Prometheus cannot find: give each a number")
    config = write_configuration(arguments.data, settings)
    sys.stdout.write(f"http://{arguments.address}/consoles/gspo.html\n")
    sys.stdout.flush()
    os.execv(program, command(program, config, arguments.data / "data", arguments.address))


def _fail(reason: str) -> int:
    sys.stderr.write(f"{reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
