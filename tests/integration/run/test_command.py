"""The ``gspo`` command as a person calls it, in processes of their own."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import Status, StatusRequest
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.cli.operator import connection
from gspo_services.cli.run.command import Watcher
from gspo_services.cli.run.display import Display
from gspo_services.cli.run.supervisor import ProcessSpec, Supervisor
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.settings.sections import Broker, Settings
from tests.support.cli.statuses import a_status
from tests.support.cli.typed import ROOT, gspo
from tests.support.processes.small_run import write_small_run
from tests.support.wire.zmq_ends import ScriptedEnd, in_background, zmq_context

HEAVY = ("torch", "transformers", "deepspeed", "sglang", "matplotlib", "safetensors", "pyarrow", "aiohttp", "sqlite3")


def imported_by(code: str) -> set[str]:
    """Heavy packages that a process has imported after ``code``, which may end in SystemExit."""
    script = (
        "import json, sys\n"
        f"try:\n    {code}\nexcept SystemExit:\n    pass\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_is_instant_because_it_imports_nothing_heavy() -> None:
    assert imported_by("from gspo_services.cli.main import main; main(['--help'])") == set()
    assert imported_by("from gspo_services.cli.main import main; main(['run', '--help'])") == set()


@pytest.mark.parametrize("name", ["broker", "rollout", "learner"])
def test_a_process_imports_no_torch_before_its_configuration_is_known_to_be_good(name: str) -> None:
    code = f"sys.argv = ['x', '--help']; import gspo_services.{name}.__main__ as process; process.main()"
    assert not imported_by(code) & {"torch", "transformers", "deepspeed", "sglang"}


@pytest.mark.parametrize("name", ["broker", "rollout", "learner"])
def test_each_process_has_its_own_help_under_the_one_command(name: str) -> None:
    done = gspo(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
    assert name in done.stdout.splitlines()[0]
    assert "--set" in done.stdout


@pytest.mark.parametrize("name", ["broker", "rollout", "learner", "run", "check"])
def test_a_broken_configuration_gives_one_line_and_status_2(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[batch]\ngrop_size = 4\n")
    done = gspo(name, str(path))
    assert done.returncode == 2
    assert "did you mean 'group_size'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_settings_prints_every_setting_as_json() -> None:
    done = gspo("check", "examples/arithmetic.toml", "--settings", "--set", "batch.max_lag=0")
    assert done.returncode == 0
    settings = json.loads(done.stdout)
    assert settings["batch"]["max_lag"] == 0
    assert settings["environment"]["name"] == "arithmetic"
    assert settings["rollout"]["pause_mode"] == "retract"


def test_environments_are_listed_with_their_options() -> None:
    done = gspo("environments")
    assert done.returncode == 0
    assert done.stderr == ""
    for part in (
        "arithmetic: ",
        "calculator: ",
        "dataset: ",
        "train_path (",
        "max_operand (default",
        '"package.module:ClassName"',
    ):
        assert part in done.stdout


def test_plot_of_a_directory_that_does_not_exist_says_so() -> None:
    done = gspo("plot", "runs/there-is-no-such-run")
    assert done.returncode == 2
    assert "there is no such directory" in done.stderr


def test_an_unknown_command_lists_the_known_ones() -> None:
    done = gspo("rnu")
    assert done.returncode == 2
    assert "run" in done.stderr
    assert "plot" in done.stderr


def test_a_run_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    done = gspo("run", "examples/arithmetic.toml", "--set", f"model.path={tmp_path}/absent")
    assert done.returncode == 2
    assert f"gspo model tiny {tmp_path}/absent" in done.stderr


def test_a_run_directory_that_cannot_be_written_gives_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    words = ("--set", f"model.path={tmp_path}/model", "--set", f"run.directory={tmp_path}/file/run")
    done = gspo("run", "examples/arithmetic.toml", "--plain", *words)
    assert done.returncode == 2
    assert f"run.directory is {tmp_path}/file/run" in done.stderr
    assert "choose another one" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_log_level_is_refused_by_the_command() -> None:
    environment = {**os.environ, "GSPO_LOG_LEVEL": "loud"}
    command = [sys.executable, "-m", "gspo_services.cli.main", "run", "examples/arithmetic.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 2
    assert "GSPO_LOG_LEVEL is 'loud'" in done.stderr


async def test_watching_ends_when_all_processes_have_ended(tmp_path: Path) -> None:
    clock = MonotonicClock()
    settings = Settings(broker=Broker(batch_endpoint="tcp://127.0.0.1:9"))
    with Display(PlainConsole(file=StringIO()), "runs/x", look="plain") as display:
        async with asyncio.timeout(120), connection(settings, clock) as broker:
            watcher = Watcher(broker, Supervisor([], tmp_path, clock), clock)
            await watcher.watch(asyncio.Event(), display)
    assert watcher.error.startswith("all processes ended before the run was complete")


@pytest.mark.parametrize("answers", [(False, True), (True,)])
async def test_the_run_is_watched_until_the_broker_says_that_it_is_finished(
    answers: tuple[bool, ...], tmp_path: Path
) -> None:
    output = StringIO()
    console = PlainConsole(file=output, width=200)
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        clock = MonotonicClock()
        spec = ProcessSpec(name="broker", module="never.started", arguments=(), stop_order=0, grace_s=1.0)
        supervisor = Supervisor([spec], tmp_path, clock)
        settings = Settings(broker=Broker(batch_endpoint=end.endpoint))

        async def broker() -> None:
            hello = await end.welcome()
            assert hello.role == "operator"
            for finished in answers:
                await end.expect(StatusRequest)
                await end.reply(Status(status=a_status(batches_trained=60, finished=finished, error="20 groups failed")))
            await asyncio.Event().wait()

        with Display(console, "runs/x", look="plain") as display:
            async with in_background(broker()), connection(settings, clock) as connected:
                watcher = Watcher(connected, supervisor, clock)
                await watcher.watch(asyncio.Event(), display)
    assert watcher.error == "20 groups failed"
    assert "batch 60/60" in output.getvalue()
    assert ("already complete, after 60 batches" in output.getvalue()) == (answers == (True,))


def test_audit_says_clean_or_names_what_is_wrong_with_a_status_for_each(tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    done = gspo("audit", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "clean"
    assert "dropped: stale" in done.stdout
    connection = sqlite3.connect(tmp_path / "run" / LEDGER_FILE)
    connection.execute("DELETE FROM batches WHERE batch = 1")
    connection.commit()
    connection.close()
    done = gspo("audit", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "batch 1 is missing before batch 2" in done.stdout
    assert done.stdout.splitlines()[-1] != "clean"
    done = gspo("audit", str(tmp_path / "run"), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["violations"]["batch missing"]["count"] >= 1
    done = gspo("audit", str(tmp_path))
    assert done.returncode == 2
    assert "is no run directory" in done.stderr
