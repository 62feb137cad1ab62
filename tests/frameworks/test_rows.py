"""`gspo tasks`: tasks of other projects become rows of a file."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gspo_services.shared.runtime.lifecycle import module_command
from tests.frameworks.guessing import guess_server, number_of
from tests.frameworks.played import PYTHONS, ROOT, Dialogue, says, stage
from tests.frameworks.verifiers_rows import SOLVE

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]

SUMS = ROOT / "examples/verifiers_sums"


async def gspo_tasks(*words: str, cwd: Path = SUMS, **variables: str) -> tuple[int, str]:
    """Exit status, and what it prints. It runs where the example's taskset lies."""
    environment = {**os.environ, **variables}
    process = await asyncio.create_subprocess_exec(
        *module_command("gspo_services.cli.main", "tasks", *words),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=cwd, env=environment,
    )  # fmt: skip
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode()


def python(home: str) -> list[str]:
    return ["--python", str(PYTHONS / home / "bin/python")]


def rows_in(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_the_tasks_of_a_verifiers_taskset_are_rows_that_the_integration_plays(tmp_path: Path) -> None:
    config, out = tmp_path / "sums.toml", tmp_path / "tasks/train.jsonl"
    config.write_text('[env.taskset]\nid = "verifiers-sums"\nmax_operand = 9\n\n[env.agent]\nmax_turns = 3\n')
    status, printed = await gspo_tasks(
        "verifiers", *python("verifiers"), "--config", str(config), "--out", str(out), "--skip", "2", "--limit", "3"
    )
    assert (status, printed) == (0, f"{out}: 3 tasks\n")
    rows = rows_in(out)
    assert [row["task"]["idx"] for row in rows] == [2, 3, 4]
    for row in rows:
        assert row["env"] == {"taskset": {"id": "verifiers-sums", "max_operand": 9}, "agent": {"max_turns": 3}}
        one, other = row["task"]["prompt"].rstrip("=").split("+")
        assert row["task"] == {**row["task"], "answer": str(int(one) + int(other))}
        assert max(int(one), int(other)) <= 9
    dialogue = Dialogue(says(rows[0]["task"]["answer"]))
    async with stage(SOLVE, "verifiers", calls={"k1": dialogue}, environment={"PYTHONPATH": str(SUMS)}) as at:
        result = await at.play(rows[0])
    assert (result.reward, result.detail) == (pytest.approx(1.1), "")


async def test_the_roles_that_the_policy_would_play_are_said(tmp_path: Path) -> None:
    config, out = tmp_path / "user.toml", tmp_path / "tasks.jsonl"
    config.write_text('[env]\nid = "user-sim"\n')
    words = ["verifiers_sums", *python("verifiers"), "--config", str(config), "--out", str(out), "--limit", "1"]
    status, printed = await gspo_tasks("verifiers", *words)
    assert (status, printed.splitlines()[1:]) == (0, ['the policy plays 2 roles: set agent.roles = ["assistant", "user"]'])


async def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    endless = "import verifiers.v1 as vf\n__all__ = ['Endless']\nclass Endless(vf.Taskset):\n    INFINITE = True\n"
    (tmp_path / "endless_vf.py").write_text(endless + "    def load(self):\n        yield from ()\n")
    there = [*python("verifiers"), "--out", str(out)]
    tried = {
        "taskset 'nobody_has_this' not found": ["verifiers", *there, "nobody_has_this"],
        "has no end: set the number of tasks with --limit": ["verifiers", *there, "endless_vf"],
        "No module named 'verifiers'": ["verifiers", "verifiers_sums", "--out", str(out)],
        "there is no Python at 'no/python'": ["verifiers", "--python", "no/python", "--out", str(out)],
        "invalid choice: 'verifier'": ["verifier"],
        "expected BEGIN:END": ["openenv", *python("agents"), "http://x", "--out", str(out), "--seeds", "9:3"],
        "unexpected keyword argument 'max_step'": [
            "openenv", *python("agents"), "http://x", "--out", str(out), "--seeds", "0:3", "--options", '{"max_step": 2}',
        ],
    }  # fmt: skip
    for told, words in tried.items():
        status, printed = await gspo_tasks(*words, cwd=tmp_path if "endless_vf" in words else SUMS)
        assert (status, told in printed) == (2, True), printed
        assert "Traceback" not in printed
    assert not out.exists()


async def test_the_tasks_of_an_openenv_server_are_its_seeds(tmp_path: Path) -> None:
    out, options = tmp_path / "tasks.jsonl", {"observation_field": "text", "action_field": "number"}
    async with guess_server(1) as url:
        status, printed = await gspo_tasks(
            "openenv", url, *python("agents"), "--out", str(out), "--seeds", "4:6", "--options", json.dumps(options),
            "--reset", '{"shown": true}',
        )  # fmt: skip
        assert (status, printed) == (0, f"{out}: 2 tasks\n")
        rows = rows_in(out)
        more = {"shown": True}
        assert rows == [{"openenv": {"url": url, **options}, "reset": {**more, "seed": seed}} for seed in (4, 5)]
        status, printed = await gspo_tasks("openenv", url, *python("agents"), "--out", str(out), "--seeds", "0:40")
        assert (status, "warning: 14 of 14 seeds tried begin with the same observation" in printed) == (0, True), printed
        dialogue = Dialogue(says(str(number_of(5))))
        async with stage("gspo.tasks.integrations.openenv:solve", "agents", calls={"k1": dialogue}) as at:
            result = await at.play(rows[1])
    assert (result.reward, result.detail) == (1.0, "")


async def test_the_help_of_the_command_and_of_an_integration() -> None:
    for words, told in (
        ([], "the following arguments are required: integration"),
        (["--help"], "gspo tasks verifiers my_taskset"),
    ):
        status, printed = await gspo_tasks(*words)
        assert (status, told in printed) == (0 if words else 2, True), printed
    status, printed = await gspo_tasks("verifiers", *python("verifiers"), "--help")
    assert (status, "--limit N" in printed) == (0, True), printed
    assert sys.executable not in printed
