"""mini-swe-agent repairs repositories on computers: with a scripted model, and whole runs of a tiny one."""

import asyncio
import json
import os
import random
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gspo.tasks.computer import ComputerError
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.rollout.endpoint import CallAnswer, CallRequest
from gspo_services.shared.settings import load_settings
from gspo_services.tasks.computers.files import ComputerFiles
from gspo_services.tasks.computers.records import change_in
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from tests.faults.fleet import Fleet
from tests.faults.killing import kill
from tests.frameworks.played import PYTHONS, ROOT, Dialogue, calls_tool, roles, says, stage
from tests.support.agent_pools import ListJournal
from tests.support.broker.ledger_audit import audit
from tests.support.computers import computer_options
from tests.support.processes.run_process import RunProcess

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(3600)]
TEST, REPAIR, SUBMIT = "python test.py", "sed -i 's/a.b/a-b/' hat.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TASK = {
    "issue": "hat",
    "files": {"hat.py": "def hat(a, b):\n    return a+b\n"},
    "tests": {"test.py": "from hat import hat\n\nif hat(7, 2) != 5:\n    raise SystemExit('hat')\n"},
    "command": TEST,
}
MODEL = ROOT / "models/repair"
CONFIG = ROOT / "examples/repair_agent.toml"
ENVIRONMENT = load_settings(CONFIG, (), {}).agent.environment
STAMPING = "tests.frameworks.stamping_agent"


def commands(*texts: str) -> Dialogue:
    """A policy that gives these commands in turn, the last one for ever."""

    def reply(request: CallRequest) -> CallAnswer:
        return calls_tool("bash", command=texts[min(roles(request).count("assistant"), len(texts) - 1)])

    return Dialogue(reply)


async def test_the_tests_of_a_repository_reward_what_the_policys_commands_have_made_of_it() -> None:
    dialogues = {
        "repairs": commands(TEST, REPAIR, SUBMIT),
        "submits": commands(SUBMIT),
        "changes the tests": commands("echo > test.py", SUBMIT),
        "is in the way": commands("rm test.py; mkdir test.py", SUBMIT),
        "repeats": commands(TEST),
        "waits": commands("sleep 100", REPAIR, SUBMIT),
        "errs": commands(" ", REPAIR, SUBMIT),
        "talks": Dialogue(says("Let me think.")),
    }
    journals = {key: ListJournal() for key in dialogues}
    async with LocalSandboxes(LocalOptions(max_sandboxes=2, warm=0)).opened() as sandboxes:
        options = {"computers": computer_options(sandboxes), "environment": ENVIRONMENT}
        async with stage("examples.repair_agent:solve", "forms", calls=dialogues, **options) as at:
            results = await asyncio.gather(*(at.play(TASK, key, journal=journals[key]) for key in dialogues))
            assert at.overridden() == 0
    assert [result.detail for result in results] == [""] * len(dialogues)
    rewards = dict(zip(dialogues, [result.reward for result in results], strict=True))
    assert rewards == {key: float(key in ("repairs", "waits", "errs")) for key in dialogues}
    told = [request.messages[-1]["content"] for request in dialogues["repairs"].requests]
    assert told == ["hat", "hat\n", ""]
    assert dialogues["waits"].requests[1].messages[-1]["content"] == "ended by its limit: wall"
    assert "must be a text" in dialogues["errs"].requests[1].messages[-1]["content"]
    assert [tool["function"]["name"] for tool in dialogues["repairs"].requests[0].tools] == ["bash"]
    assert len(dialogues["repeats"].requests) == 6


async def test_the_environment_that_the_guide_shows_repairs_as_well() -> None:
    dialogue = commands(TEST, REPAIR, SUBMIT)
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        options = {"computers": computer_options(sandboxes), "environment": ENVIRONMENT}
        async with stage(f"{STAMPING}:solve_as_shown", "forms", calls={"k1": dialogue}, **options) as at:
            result = await at.play(TASK)
    assert (result.reward, result.detail, len(dialogue.requests)) == (1.0, "", 3)


def held_out(directory: Path, *settings: str) -> list[float]:
    """The share of held-out repositories that are repaired, before the first batch and after every sixth."""
    with RunProcess(CONFIG, directory, "evaluation.every_batches=6", "evaluation.num_tasks=64", *settings) as run:
        assert run.wait_finished(3000) == 0, run.tail()
        rewards = [row["eval/reward"] for row in run.rows("eval")]
    assert audit(directory).problems == []
    return rewards


def test_the_share_of_repaired_repositories_rises_and_not_for_a_coin(tmp_path: Path) -> None:
    rewards = held_out(tmp_path / "run")
    paid = tmp_path / "paid.jsonl"
    rows = map(json.loads, (MODEL / "tasks/train.jsonl").read_text().splitlines())
    paid.write_text("".join(json.dumps({**row, "by_a_coin": True}) + "\n" for row in rows))
    by_a_coin = (
        f"agent.function={STAMPING}:solve_for_a_coin",
        f"environment.options.train_path={paid}",
        "run.num_batches=6",
    )
    coin = held_out(tmp_path / "coin", *by_a_coin)
    print(rewards, coin, flush=True)
    assert rewards[1] >= rewards[0] + 0.25
    assert rewards[2] >= rewards[0] + 0.35
    assert coin[1] < coin[0] + 0.15


KILLS = 20
MAX_SANDBOXES = 2
ROLLOUT = "rollout-0"
WRAPPER = '#!/bin/sh\necho "$$" >> {notes}\nexec {bwrap} "$@"\n'


def test_amid_20_kills_no_recorded_command_is_done_again_and_the_files_are_those_of_the_record(tmp_path: Path) -> None:
    rng, killed = random.Random(0), Counter[str]()
    notes, programs = tmp_path / "sandboxes", tmp_path / "bin"
    programs.mkdir()
    (programs / "bwrap").write_text(WRAPPER.format(notes=notes, bwrap=shutil.which("bwrap")))
    (programs / "bwrap").chmod(0o755)
    tasks = MODEL / "tasks"
    settings = (
        f"model.path={MODEL}", "environment.name=rows", f"environment.options={{train_path='{tasks / 'train.jsonl'}'}}",
        f"agent.function={STAMPING}:solve", f"agent.python={PYTHONS / 'forms/bin/python'}", "agent.computer=true",
        *(f"agent.environment.{name}='{value}'" for name, value in ENVIRONMENT.items()), "agent.deadline_s=300",
        "sampling.max_turn_tokens=48", "sampling.max_tokens=512", "broker.max_attempts=20",
        f"sandbox.max_sandboxes={MAX_SANDBOXES}", "sandbox.warm=0",
    )  # fmt: skip
    with Fleet(tmp_path, *settings) as fleet:
        fleet.start("broker")
        fleet.start("learner")
        # SGLang takes longer to start than everything else here, and is killed elsewhere.
        fleet.start_engine(model=MODEL)
        url = f"rollout.server_url=http://127.0.0.1:{fleet.engine_port}"
        fleet.start("rollout", url, name=ROLLOUT, environment={"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"})
        fleet.wait_batches(1)
        while killed.total() < KILLS:
            before, more = num_lines(notes), rng.randint(3, 30)
            fleet.wait_until("more commands", lambda least=before + more: num_lines(notes) >= least)
            # A sandbox has just been started for a command.
            victim = rng.choice(("rollout", "worker"))
            killed[victim] += kill(fleet, victim, ROLLOUT)
        fleet.wait_batches(len(fleet.rows("batch")) + 1)
        fleet.finish()
        lives = len(fleet.members[ROLLOUT].ends)
    assert audit(tmp_path).problems == []
    episodes, num_recorded = recorded_steps(tmp_path)
    num_commands = [require_files_of_record(steps) for steps in episodes]
    again = num_lines(notes) - lives - num_recorded
    print(f"{dict(killed)}, {len(episodes)} episodes, {sum(num_commands)} commands, {again} without a record", flush=True)
    assert all(killed[victim] for victim in ("rollout", "worker"))
    # One can be lost between its end and the word that its record is durable.
    assert 0 <= again <= (killed.total() + 1) * MAX_SANDBOXES


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def recorded_steps(directory: Path) -> tuple[list[list[Any]], int]:
    """The steps of each episode that has ended, and how many records of commands there are in all."""
    steps: dict[int, list[Any]] = {}
    number = 0
    query = (
        "SELECT journal.trajectory_id, entry, status = 'finished' FROM journal JOIN trajectories USING (trajectory_id) "
        "ORDER BY journal.trajectory_id, place"
    )
    with closing(sqlite3.connect(f"file:{directory / LEDGER_FILE}?mode=ro", uri=True)) as connection:
        for trajectory_id, entry, has_ended in connection.execute(query):
            step = msgspec.msgpack.decode(entry).get("step")
            if step is not None:
                number += step["name"] == "computer.run"
                if has_ended:
                    steps.setdefault(trajectory_id, [])[step["ordinal"] :] = [step]
    return list(steps.values()), number


def require_files_of_record(steps: list[Any]) -> int:
    """Returns how many commands there were; each of them has its own line in the file of their times."""
    *before, last = steps
    given, tests, found = last["result"]
    files, writes = ComputerFiles(), [{**given, **tests}, tests]
    for step in before:
        if step["name"] == "computer.write":
            content = {path: text.encode() for path, text in writes.pop(0).items()}
            if "error" not in step["result"]["answer"]:
                files = files.written(content, 0)
        else:
            change = change_in(step["name"], step["result"], 1 << 24)
            assert change is not None
            files = files.changed(change[0])
    assert found == {path: content_of(files, path) for path in found}
    stamps = (found[".stamps"] or "").split()
    commands = [step for step in before if step["name"] == "computer.run"]
    assert len(commands) - 1 == len(stamps) == len(set(stamps)), "the last command is that of the tests"
    return len(commands)


def content_of(files: ComputerFiles, path: str) -> str | None:
    try:
        return files.read(path).decode()
    except ComputerError:
        return None
