"""A user's project that has packages called services, protocol and tests, a utils.py, and files named like ours.

Run by `make test-wheel`, once with this checkout's own environment, and once with the wheel in an environment that holds,
without this checkout, the third parties installed here.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.installation import (
    environment,
    environment_of_a_user,
    pip,
    show_third_parties,
)
from tests.support.processes.ports import free_ports

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

PROJECT = Path(__file__).with_name("user_project")
ENVIRONMENTS = ("my_env:MyEnv", "services.tasks:Words")
# Each raises when it is imported: no process of ours may take one of these for its own module or for Python's.
SHADOWS = ("random.py", "msgspec.py", "gspo/__init__.py", "gspo_services/__init__.py", "gspo_protocol/__init__.py")


@pytest.fixture(scope="module", params=["wheel", "checkout"])
def commands(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment that holds the wheel, or of this checkout's."""
    if request.param == "checkout":
        return Path(sys.executable).parent
    folder = tmp_path_factory.mktemp("wheel")
    python = environment(folder / "venv")
    pip("install", "--no-deps", "--quiet", wheel, python=python)
    show_third_parties(python)
    return python.parent


@pytest.fixture(scope="module")
def model(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without its cold start, made by the wheel."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    code = (
        "import sys; from pathlib import Path; from gspo.tiny_models import make_tiny_model; "
        "make_tiny_model(Path(sys.argv[1]), num_steps=3, num_eval_episodes=1, progress=lambda _: None)"
    )
    done = subprocess.run(
        [commands / "python", "-I", "-c", code, folder], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture
def shadowing_project(project: Path, commands: Path) -> Path:
    """The same project with files that would hide Python's modules, a third party's, and ours.

    A checkout's own environment finds our packages after the working directory's, as any editable installation does.
    """
    editable = commands == Path(sys.executable).parent
    for name in SHADOWS:
        if editable and name.startswith("gspo"):
            continue
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(f'raise RuntimeError("{name} of the working directory was imported")\n')
    return project


def arguments(project: Path, *overrides: str) -> list[str]:
    """The configuration file and settings that give each process a port of its own."""
    work, batch, weights, *metrics = free_ports(6)
    settings = [
        f"broker.work_endpoint=tcp://127.0.0.1:{work}",
        f"broker.batch_endpoint=tcp://127.0.0.1:{batch}",
        f"learner.weights_endpoint=tcp://127.0.0.1:{weights}",
        *(f"{name}.metrics_port={port}" for name, port in zip(("broker", "learner", "rollout"), metrics, strict=True)),
        *overrides,
    ]
    return [str(project / "run.toml"), *(word for setting in settings for word in ("--set", setting))]


def gspo(commands: Path, project: Path, *words: str, timeout_s: float = 60.0) -> str:
    done = subprocess.run(
        [commands / "gspo", *words], cwd=project, env=environment_of_a_user(), capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:] + logs(project)
    return done.stdout


def logs(project: Path) -> str:
    return "".join(f"\n{path.name}: {path.read_text()[-2000:]}" for path in sorted(project.glob("out/logs/*")))


def lines_until(process: subprocess.Popen[str], event: str) -> Iterator[str]:
    """The lines that a process logs up to the one of ``event``."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if f'"event": "{event}"' in line:
            return


def test_the_commands_run_beside_packages_of_the_same_names(commands: Path, project: Path) -> None:
    settings = json.loads(gspo(commands, project, "check", "run.toml", "--settings"))
    assert settings["environment"]["name"] == "my_env:MyEnv"
    assert "dataset: " in gspo(commands, project, "environments")


def test_check_finds_the_reward_the_environment_and_the_agent_of_the_project(
    commands: Path, project: Path, model: Path
) -> None:
    for name in ("run.toml", "agent.toml"):
        assert "it can run" in gspo(commands, project, "check", name, "--set", f"model.path={model}", timeout_s=200)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_broker_starts_and_finds_the_environment_of_the_project(commands: Path, project: Path, name: str) -> None:
    assert_broker_serves(commands, project, name)


def test_files_of_the_working_directory_hide_no_module_from_the_broker(commands: Path, shadowing_project: Path) -> None:
    assert_broker_serves(commands, shadowing_project, "services.tasks:Words")


def assert_broker_serves(commands: Path, project: Path, name: str) -> None:
    broker = subprocess.Popen(
        [commands / "gspo", "broker", *arguments(project, f"environment.name={name}")],
        cwd=project, env=environment_of_a_user(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        written = list(lines_until(broker, "broker_started"))
        assert broker.poll() is None, "".join(written)
        assert '"event": "broker_started"' in written[-1], "".join(written)
    finally:
        broker.send_signal(signal.SIGTERM)
        broker.communicate(timeout=60)
    assert broker.returncode == 0


def test_a_script_of_the_project_opens_a_run(commands: Path, project: Path) -> None:
    """``gspo.runs`` is found, although the project has a package ``services`` of its own."""
    code = (
        "import services.tasks\nfrom gspo.runs import HeldOut, Run\nprint(Run.__module__, HeldOut.__module__)\n"
        "print(Run.open('run').evaluations()[0].reward)"
    )
    (project / "run").mkdir()
    line = {"line": 1, "event": "eval", "batch": 0, "policy_version": 1, "eval/reward": 0.25, "num_finished": 4}
    (project / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (project / "script.py").write_text(code)
    done = subprocess.run(
        [commands / "python", "script.py"], cwd=project, env=environment_of_a_user(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gspo_services.runs.scripting.run", "gspo_services.runs.metrics.events", "0.25"]


def test_a_run_trains_on_the_rewards_of_the_project(commands: Path, shadowing_project: Path, model: Path) -> None:
    """Broker, rollout, SGLang with our platform, reward workers and two ranks, beside files that would hide modules."""
    words = arguments(shadowing_project, f"model.path={model}", "learner.num_ranks=2")
    gspo(commands, shadowing_project, "run", *words, "--plain", timeout_s=400)
    rows = [json.loads(line) for line in (shadowing_project / "out" / "metrics.jsonl").read_text().splitlines()]
    batches = [row for row in rows if row["event"] == "batch"]
    assert [row["line"] for row in batches] == [1, 2]
    assert all(3 <= row["reward_mean"] <= 4 for row in batches)
