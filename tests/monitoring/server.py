"""A real Prometheus on loopback, with the repository's rules sped up."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deploy.monitoring.generate import RULES
from deploy.monitoring.monitor import command, configuration
from tests.support.processes.ports import free_port

FASTER = 10
"""Windows and waits are shorter than in the rules by this factor."""
LONGEST_WAIT_S = 8
QUIET_S = 45
"""The bound that replaces half an hour without a batch."""
SCRAPE_S = 3
POLL_S = 0.5
UNITS = {"s": 1, "m": 60, "h": 3600}


def sped_up(rules: str) -> str:
    """The same rules with shorter windows and waits. Raises: ValueError when GspoNoProgress has another bound."""

    def seconds(number: str, unit: str) -> float:
        return int(number) * UNITS[unit] / FASTER

    sooner = re.sub(r"\[(\d+)([smh])\]", lambda found: f"[{seconds(*found.groups()):.0f}s]", rules)
    sooner = re.sub(r"for: (\d+)([smh])", lambda found: f"for: {min(LONGEST_WAIT_S, seconds(*found.groups())):.0f}s", sooner)
    sooner = re.sub(r"interval: 15s", f"interval: {SCRAPE_S}s", sooner)
    if "GspoNoProgress" in sooner and "> 1800" not in sooner:
        raise ValueError("the bound of GspoNoProgress is not 1800: change it here, too")
    return sooner.replace("> 1800", f"> {QUIET_S}")


class PrometheusServer:
    """A running Prometheus; use as a context manager. ``targets`` maps a pod's name to its component and port."""

    def __init__(self, directory: Path, targets: dict[str, tuple[str, int]]) -> None:
        directory.mkdir()
        program = shutil.which("prometheus")
        assert program is not None, "prometheus is not installed: apt-get install prometheus"
        rules = []
        for path in sorted(RULES.glob("*.yaml")):
            rules.append(directory / path.name)
            rules[-1].write_text(sped_up(path.read_text()))
        found = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"component": component, "pod": name}}
            for name, (component, port) in targets.items()
        ]
        (directory / "targets.json").write_text(json.dumps(found))
        config = directory / "prometheus.yml"
        config.write_text(json.dumps(configuration(directory / "targets.json", rules, SCRAPE_S)))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self._log = (directory / "prometheus.log").open("wb")
        self._command = command(program, config, directory / "data", address)
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = threading.Event()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        self.wait_until("Prometheus to be ready", self._is_ready, 60)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def api(self, path: str, **parameters: str) -> Any:
        """The data of Prometheus's answer. Raises: urllib.error.HTTPError with the reason in its body."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """Firing alerts by name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in self.api("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    def value(self, expr: str) -> float | None:
        """The first result of a query."""
        results = self.api("query", query=expr)["result"]
        return float(results[0]["value"][1]) if results else None

    def wait_firing(self, name: str, timeout_s: float = 120, **labels: str) -> dict[str, Any]:
        """The alert with these labels, once it fires. Raises: AssertionError with what fires instead."""
        chosen: list[dict[str, Any]] = []

        def fires() -> bool:
            chosen[:] = [
                alert
                for alert in self.firing().get(name, [])
                if all(alert["labels"].get(label) == value for label, value in labels.items())
            ]
            return bool(chosen)

        self.wait_until(f"{name} {labels} to fire", fires, timeout_s)
        return chosen[0]

    def wait_quiet(self, *names: str, timeout_s: float = 240) -> None:
        """Wait until none of these alerts fires."""
        self.wait_until(f"{names} to end", lambda: not set(names) & set(self.firing()), timeout_s)

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process is not None
            assert self._process.poll() is None, "Prometheus ended"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}; firing: {self._summary()}"
            self._pause.wait(POLL_S)

    def _summary(self) -> list[str]:
        return [alert["annotations"]["summary"] for alerts in self.firing().values() for alert in alerts]
