"""An episode's computer, on a plain folder: what is recorded is not executed again, and the files are those of the record.

Real walls and hostile commands: tests/sandbox/test_computers.py.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gspo_services.tasks.computers.files import BadChange, ComputerFiles, entry
from tests.support.agent_pools import agent_pool, agent_task
from tests.support.computers import FolderSandboxes, KeepingJournal, computer_options, played, player

SCRIPT: list[Any] = [
    ["write", {"in/a": "1\n", "b": "2\n"}],
    ["run", "cat in/a >> log; rm b; chmod 700 in/a; ln -s log link; mkdir empty; echo $0 ran"],
    ["write", {"in/a": "3\n"}],
    ["read", "log"],
    ["run", "cat in/a >> log; exit 3"],
    ["read", "log"],
    ["run", "cat log; ls; test -x in/a; echo $?; cat link"],
]
LAST = "1\n3\nempty\nin\nlink\nlog\n0\n1\n3\n"


@pytest.mark.parametrize("function", ["play", "play_in_thread"])
async def test_wherever_an_episode_is_cut_off_no_recorded_command_runs_again(tmp_path: Path, function: str) -> None:
    sandboxes, whole = FolderSandboxes(tmp_path), KeepingJournal()
    async with player(sandboxes, function) as play:
        assert (await play(whole, SCRIPT)).reward == 1.0
        assert whole.told[3:] == ["1\n", [3, "", None], "1\n3\n", [0, LAST, None]]
        commands = list(sandboxes.commands)
        assert len(commands) == 3
        for num_known in range(1, len(whole.steps)):
            sandboxes.commands.clear()
            journal = KeepingJournal(*whole.steps[:num_known])
            assert (await play(journal, SCRIPT)).reward == 1.0
            assert journal.told == whole.told
            num_commands_known = sum(step.name == "computer.run" for step in whole.steps[:num_known])
            assert sandboxes.commands == commands[num_commands_known:]
    assert sandboxes.num_open == 0


async def test_an_episode_that_goes_another_way_has_the_files_of_that_way(tmp_path: Path) -> None:
    journal = KeepingJournal()
    async with player(FolderSandboxes(tmp_path)) as play:
        await play(journal, [["run", "echo a > a"], ["run", "echo b > b"], ["run", "echo c > c"]])
        journal = KeepingJournal(*journal.steps)
        await play(journal, [["run", "echo a > a"], ["run", "echo d > d"], ["run", "ls"]])
    assert journal.told[-1] == [0, "a\nd\n", None]


async def test_a_change_that_is_too_large_for_the_record_is_marked_and_one_for_the_computer_is_undone(
    tmp_path: Path,
) -> None:
    journal = KeepingJournal()
    script = [["run", "head -c 200000 /dev/urandom > big"], ["run", "head -c 2000000 /dev/zero > huge"], ["run", "ls"]]
    await played(FolderSandboxes(tmp_path), journal, script)
    assert journal.told[0] == [0, "", None]
    assert journal.told[1][::2] == [None, "file"]
    assert "undone: more than 1048576 bytes of files" in journal.told[1][1]
    assert journal.told[2] == [0, "big\n", None]
    files = [step.result["files"] for step in journal.steps[:3] if isinstance(step.result, dict)]
    assert files == [None, None, None], "what comes after a lost change is lost, too"


async def test_long_output_has_its_head_and_its_tail(tmp_path: Path) -> None:
    journal = KeepingJournal()
    await played(FolderSandboxes(tmp_path), journal, [["run", "seq 100000"]])
    output = journal.told[0][1]
    assert (output[:4], output[-7:], len(output) < 17_000) == ("1\n2\n", "100000\n", True)
    assert "[... 572511 bytes left out ...]" in output


REFUSED: list[tuple[list[Any], str]] = [
    (["read", "../a"], "'../a' must be relative"),
    (["read", "/etc/passwd"], "'/etc/passwd' must be relative"),
    (["write", {"a//b": ""}], "'a//b' must be relative"),
    (["write", {"a\0": ""}], r"'a\x00' must be relative"),
    (["write", {"b": "", ".": ""}], "'.' must be relative"),
    (["write", {"x" * 513: ""}], "of at most 512 bytes"),
    (["write", {"a": "x" * 2_100_000}], "one write takes"),
    (["write", {"a": "x" * 1_100_000}], "agent.computer_bytes is 1048576"),
    (["write", {"there/b": ""}], "goes through 'there', which is no folder"),
    (["read", "nowhere"], "there is no such file"),
    (["read", "link"], "it is a link"),
    (["write", {"link": ""}], "is a link: remove it first"),
    (["run", " "], "must be a text"),
    (["run", "a\0"], "without zero bytes"),
    (["run", "ls", 61], "timeout_s is 61: sandbox.max_wall_s allows 60"),
    (["run", "ls", -1], "timeout_s is -1"),
]


async def test_what_no_computer_takes_is_refused_and_the_episode_goes_on(tmp_path: Path) -> None:
    script = [["run", "echo 1 > there; ln -s /etc/passwd link"], *(asked for asked, _ in REFUSED), ["run", "ls"]]
    async with player(FolderSandboxes(tmp_path)) as play:
        journal = KeepingJournal()
        await play(journal, script)
        said = journal.told[1:-1]
        assert [text for text, (_, refused) in zip(said, REFUSED, strict=True) if refused not in text] == []
        assert all(text.startswith("refused: ") for text in said)
        assert journal.told[-1] == [0, "link\nthere\n", None]
        again = KeepingJournal(*journal.steps)
        await play(again, script)
        assert [name for name, *_ in again.calls] == [], "a refusal is replayed as it was"


async def test_a_sandbox_that_fails_is_replaced_once(tmp_path: Path) -> None:
    sandboxes = FolderSandboxes(tmp_path, num_failures=1)
    assert (await played(sandboxes, KeepingJournal(), [["run", "echo 1"]])).reward == 1.0
    result = await played(FolderSandboxes(tmp_path, num_failures=2), KeepingJournal(), [["run", "echo 1"]])
    assert (result.failure, result.detail) == ("sandbox", "the sandbox has ended")


async def test_an_episode_that_ends_takes_its_command_with_it(tmp_path: Path) -> None:
    sandboxes = FolderSandboxes(tmp_path)
    async with agent_pool("tests.support.computer_agents:play", computers=computer_options(sandboxes), grace_s=60.0) as pool:
        async with asyncio.timeout(10):
            script = [["run", "exec sleep 50", 60]]
            result = await pool.solve(agent_task("play", script=script, deadline_s=1.0), KeepingJournal())
    assert (result.failure, sandboxes.num_open) == ("deadline", 0)


async def test_without_the_setting_an_episode_has_no_computer() -> None:
    async with agent_pool("tests.support.computer_agents:play") as pool:
        result = await pool.solve(agent_task("play", script=[["run", "ls"]]), KeepingJournal())
    assert (result.failure, "agent.computer is false: set it to true" in result.detail) == ("raised", True)


@pytest.mark.parametrize(
    "change",
    [
        b"",
        b"[]\n",
        b'{"removed":["b"],"entries":[]}\n',
        b'{"removed":[],"entries":[["../a","file",420,0,1]]}\nx',
        b'{"removed":[],"entries":[["a","file",420,0,2]]}\nx',
        b'{"removed":[],"entries":[["a","file",420,0,1]]}\nxy',
        b'{"removed":[],"entries":[["a","device",420,0,1]]}\nx',
        b'{"removed":[],"entries":[["a","file",1e999,0,1]]}\nx',
    ],
)
def test_what_is_no_change_of_files_is_refused(change: bytes) -> None:
    files = ComputerFiles({"a": entry("file", 0o644, 0, b"1")})
    with pytest.raises(BadChange):
        files.changed(change)
    assert files.read("a") == b"1"
