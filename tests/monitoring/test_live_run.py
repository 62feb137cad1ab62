"""A real Prometheus and a real run: SGLang, broker, learner, with keys. For one fault after the other, its alert fires.

Meanwhile every query of every dashboard is answered, and a real browser draws the page.
"""

import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.monitoring.content import DASHBOARDS
from gspo_protocol.channels import WORK
from gspo_services.shared.runtime.errors import ServiceError
from tests.monitoring.server import PrometheusServer
from tests.support.processes.ports import free_ports
from tests.support.processes.run_process import REPOSITORY, RunProcess
from tests.support.wire.keys import make_keys, security_of
from tests.support.wire.zmq_ends import a_client, zmq_context

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(1800)]
MODEL = REPOSITORY / "models" / "tiny"
LEASE_S = 5
CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1500,1400", "--virtual-time-budget=20000",
)  # fmt: skip


(SANDBOXES,) = (row for each in DASHBOARDS for row in each.rows if row.title == "Sandboxes")
NOTHING_TO_DRAW = {
    ("Alerts that fire", "{{alertname}}"),
    ("Refused messages", "{{reason}}"),
    ("Components of the reward", "{{name}}"),
    ("Calls of agents", "{{status}}"),
    ("Refused calls", "{{code}}"),
    ("Time of a call", "median"),
    ("Time of a call", "95 %"),
    ("Evaluation sets", "{{set}} {{metric}}"),
    ("Experts changed", "all"),
    ("Experts changed", "engine's"),
    *((panel.title, query.legend) for panel in SANDBOXES.panels for query in panel.queries),
}
"""Series that do not exist before their first event; this run has no agents, a reward without components, no named
evaluation sets, no pass over a batch before its updates, and no server of sandboxes."""


@dataclass
class Watched:
    """A run with one rollout, and the Prometheus that watches it."""

    run: RunProcess
    prometheus: PrometheusServer
    keys: Path
    work_endpoint: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    keys = make_keys(directory / "keys")
    (port,) = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    run = RunProcess(
        REPOSITORY / "examples/arithmetic.toml",
        directory / "run",
        f"model.path={MODEL}",
        f"broker.work_endpoint={endpoint}",
        f"broker.lease_s={LEASE_S}",
        f"security.keys={keys}",
        "run.num_batches=100000",
        "rollout.num_servers=1",
        "batch.groups_per_batch=8",
        "batch.group_size=4",
        "evaluation.num_tasks=8",
    )
    components = {"broker": "broker", "learner": "learner", "rollout-0": "rollout"}
    targets = {name: (component, run.metrics_ports[name]) for name, component in components.items()}
    with run, PrometheusServer(directory / "prometheus", targets) as prometheus:
        run.wait_until("third batch", lambda: len(run.rows("batch")) >= 3, 900)
        yield Watched(run, prometheus, keys, endpoint)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Suspend the process inside this block, as if it hung."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_run_that_trains_sets_off_no_alert(watched: Watched) -> None:
    prometheus = watched.prometheus
    prometheus.wait_until("all three to answer", lambda: prometheus.value("sum(up)") == 3, 120)
    prometheus.wait_quiet("GspoProcessDown", "GspoProcessMissing", "GspoLearnerAway", "GspoNoRollouts")
    trained = prometheus.value("gspo_broker_batches_trained")
    assert trained is not None
    prometheus.wait_until(
        "two more batches", lambda: (prometheus.value("gspo_broker_batches_trained") or 0) > trained + 1, 300
    )
    # Alerts about learning are meant for windows of many batches, not for the seconds of this test.
    assert [name for name, found in prometheus.firing().items() if found[0]["labels"]["severity"] == "critical"] == []


def test_every_query_of_every_panel_has_something_to_draw(watched: Watched) -> None:
    queries = {
        (panel.title, query.legend): query for page in DASHBOARDS for panel in page.panels() for query in panel.queries
    }

    def still_empty() -> set[tuple[str, str]]:
        # Asked again: on a busy machine a scrape may come too late, and its target then has no values.
        for place, query in list(queries.items()):
            expr = query.expr.replace("$namespace", ".*").replace("$__rate_interval", "60s")
            if watched.prometheus.api("query", query=expr)["result"]:
                del queries[place]
        return set(queries)

    with contextlib.suppress(AssertionError):  # The comparison below names them.
        watched.prometheus.wait_until("all panels", lambda: still_empty() <= NOTHING_TO_DRAW, 90)
    assert still_empty() <= NOTHING_TO_DRAW


def test_the_page_is_drawn_by_a_browser(watched: Watched, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    assert chromium is not None, "chromium is not installed: apt-get install chromium fonts-dejavu-core"
    for page in DASHBOARDS:
        address = f"{watched.prometheus.url}/consoles/gspo.html?range=300#{page.uid}"
        options = [*CHROMIUM_FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
        shown = subprocess.run([chromium, *options], capture_output=True, text=True, check=True, timeout=300).stdout
        assert re.search(r'data-failed="(\d+)"', shown)[1] == "0", page.uid  # type: ignore[index]
        drawn = int(re.search(r'data-drawn="(\d+)"', shown)[1])  # type: ignore[index]
        num_panels = len(list(page.panels()))
        assert re.search(rf'data-panels="{num_panels}"', shown)
        assert drawn >= 0.7 * num_panels, (page.uid, drawn, num_panels)


def test_a_client_with_an_unknown_key_is_reported(watched: Watched, tmp_path: Path) -> None:
    stranger = make_keys(tmp_path / "strange")
    (stranger / "broker.public").write_bytes((watched.keys / "broker.public").read_bytes())

    async def knock() -> None:
        async with zmq_context() as context:
            client = a_client(context, WORK, watched.work_endpoint, security=security_of(stranger, "rollout"))
            async with asyncio.timeout(60):
                await client.run()

    with pytest.raises(ExceptionGroup) as refused:
        asyncio.run(knock())
    assert refused.group_contains(ServiceError, match="refused the key rollout")
    alert = watched.prometheus.wait_firing("GspoConnectionsRefused", reason="unknown_key")
    assert alert["annotations"]["summary"] == "The broker refuses connections: unknown_key"


def test_a_disk_that_refuses_writes_is_reported_and_the_run_continues_afterwards(watched: Watched) -> None:
    pid = watched.run.pid_of("gspo_services.broker")
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # From now on no file may grow: writes fail as on a full disk.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        alert = watched.prometheus.wait_firing("GspoCommitsFail")
        assert "nothing is acknowledged" in alert["annotations"]["description"]
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    watched.prometheus.wait_quiet("GspoCommitsFail")


def test_a_learner_that_hangs_is_down_and_the_run_makes_no_progress(watched: Watched) -> None:
    with stopped(watched.run.pid_of("gspo_services.learner")):
        watched.prometheus.wait_firing("GspoProcessDown", component="learner", pod="learner")
        alert = watched.prometheus.wait_firing("GspoNoProgress")
        assert alert["annotations"]["summary"].startswith("No batch was trained for")
    watched.prometheus.wait_quiet("GspoProcessDown", "GspoNoProgress")


def test_a_broker_that_hangs_is_down(watched: Watched) -> None:
    with stopped(watched.run.pid_of("gspo_services.broker")):
        alert = watched.prometheus.wait_firing("GspoProcessDown", component="broker")
        assert alert["annotations"]["summary"] == "broker broker does not answer"
    watched.prometheus.wait_quiet("GspoProcessDown")


def test_a_rollout_that_hangs_starves_the_learner_until_it_is_killed(watched: Watched) -> None:
    watched.prometheus.wait_quiet("GspoNoRollouts")
    # One that was only killed is back before an alert that waits: it starts in seconds.
    os.kill(watched.run.pid_of("gspo_services.rollout", "rollout-0"), signal.SIGSTOP)
    watched.prometheus.wait_firing("GspoNoRollouts")
    watched.prometheus.wait_firing("GspoLearnerStarved")
    watched.run.kill("gspo_services.rollout", "rollout-0")
    # gspo run starts the rollout again, which ends the alert.
    watched.prometheus.wait_quiet("GspoNoRollouts", timeout_s=600)
