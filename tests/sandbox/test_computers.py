"""Episodes' computers in real sandboxes: a kill amid commands, hostile commands, and neighbours."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_services.rollout.agents import open_solver
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import load_settings
from gspo_services.tasks.agents import RecordedStep
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from tests.support.agent_pools import agent_pool, agent_task
from tests.support.computers import KeepingJournal, computer_options, played, player

pytestmark = pytest.mark.sandbox

SCRIPT: list[Any] = [["write", {"a": "1\n"}], *[["run", "cat a >> log; date +%N >> times; cat log"] for _ in range(4)]]
PATH = os.pathsep.join([str(Path("names").absolute()), str(Path.cwd()), *(part for part in sys.path if part)])
PLAYS = """
import asyncio, json, os, sys
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from tests.support.computers import KeepingJournal, played
class Stopping(KeepingJournal):
    async def record(self, step, ordinal):
        print(json.dumps(step), flush=True)
        if ordinal == int(sys.argv[1]):
            print("stop", flush=True)
            await asyncio.Event().wait()
async def main():
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        await played(sandboxes, Stopping(), json.loads(sys.argv[2]))
asyncio.run(main())
"""


@pytest.mark.parametrize("last", [0, 1, 3])
async def test_after_kill_9_amid_commands_no_recorded_one_runs_again(
    last: int, tmp_path: Path, nothing_is_left: None
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PLAYS, str(last), json.dumps(SCRIPT), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[bytes] = []
    async with asyncio.timeout(60):
        while (line := await process.stdout.readline()).strip() != b"stop":
            assert line, lines
            lines += [line] if line.startswith(b"[") else []
    process.send_signal(signal.SIGKILL)
    await process.wait()
    journal = KeepingJournal(*(RecordedStep(*json.loads(line)) for line in lines))
    assert len(journal.steps) == last + 1
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        await played(sandboxes, journal, [*SCRIPT, ["run", "wc -l < times"]])
    assert [said[1] for said in journal.told[1:]] == ["1\n" * number for number in range(1, 5)] + ["4\n"]


async def test_hostile_commands_end_at_their_limit_and_the_files_stay(nothing_is_left: None) -> None:
    journal = KeepingJournal()
    script: list[Any] = [
        ["write", {"kept": "kept"}],
        ["run", "sleep 1000", 1],
        ["run", "yes"],
        ["run", "while i=$((i+1)); do head -c 9000000 /dev/zero > big$i; done"],
        ["run", "python -c 'x = [bytearray(10**7) for _ in range(100)]'"],
        ["run", "f() { f | f & }; f; wait; sleep 1000", 2],
        ["run", "rm -rf /sandbox/tool /sandbox/bin; echo 'raise SystemExit' > /sandbox/json.py; chmod 000 kept ."],
        ["run", "cat kept; ls"],
    ]
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        assert (await played(sandboxes, journal, script)).reward == 1.0
    limits = [said[2] for said in journal.told[1:]]
    assert limits[:4] == ["wall", "output", "file", "memory"]
    assert limits[5:] == [None, None]
    assert journal.told[-1] == [0, "keptkept\n", None]


WILD: list[tuple[str, Any, str | None]] = [
    ("(sleep 1; echo late > late) & setsid sh -c 'sleep 1; echo late > late' > /dev/null &", 0, None),
    ("kill -STOP $$", None, "wall"),
    ("kill -9 -1; sleep 100", None, "wall"),
    ("truncate -s 60M hole", None, "file"),
    ("cat /dev/zero > one", None, "file"),
    ("i=0; while [ $i -lt 10001 ]; do i=$((i+1)); : > n$i; done", None, "file"),
    ('python -c \'import os; [(os.mkdir("ab"), os.chdir("ab")) for _ in range(600)]\'', None, "file"),
    ("cat /dev/zero > /tmp/one", 153, None),
    ("cat /etc/passwd /root/.profile; echo x > /usr/x; echo x > /sandbox/../etc/x; ls ../..", 0, None),
    ("ln -s / root; ln -s ../tool tool; ln -s own loop; ln -s loop own; mkfifo pipe", 0, None),
    ("touch -d @99999999999 old; touch -d @-99999999999 new; touch \"$(printf '\\377\\nx')\"; chmod 7000 old", 0, None),
    ("cat root/etc/passwd; echo x > tool/pack.py; echo x > root/sandbox/tool/x; echo x > root/x", 2, None),
    ("ls -A | od -An -c | tr -d ' \\n'", 0, None),
]
"""A command, its exit code, and the limit that ends it."""


async def test_wild_commands_leave_a_computer_that_goes_on_and_the_record_has_its_files(nothing_is_left: None) -> None:
    wild = [["run", command, 2 if limit == "wall" else 30] for command, _, limit in WILD]
    script: list[Any] = [["run", "echo kept > kept"], *wild, ["read", "kept"]]
    journal, again = KeepingJournal(), KeepingJournal()
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        async with player(sandboxes) as play:
            assert (await play(journal, script)).reward == 1.0
            again = KeepingJournal(*journal.steps[:-2])
            assert (await play(again, script)).reward == 1.0
    said = journal.told[1:-1]
    assert [(code, limit) for code, _, limit in said] == [(code, limit) for _, code, limit in WILD]
    assert journal.told[-1] == "kept\n"
    assert said[-1][1] == r"kept\nloop\nnew\nold\nown\nroot\ntool\n377\nx\n"
    assert again.told[-2:] == journal.told[-2:]


async def test_many_episodes_share_few_sandboxes_and_do_not_see_each_other(nothing_is_left: None) -> None:
    async with LocalSandboxes(LocalOptions(max_sandboxes=2, warm=0)).opened() as sandboxes:
        async with agent_pool("tests.support.computer_agents:play", computers=computer_options(sandboxes)) as pool:
            journals = [KeepingJournal() for _ in range(20)]
            scripts = [[["run", f"ls; echo {n} > own-{n}"], ["run", "cat *; ls /tmp /sandbox"]] for n in range(20)]
            async with asyncio.timeout(120):
                await asyncio.gather(
                    *(
                        pool.solve(agent_task("play", script=each), journal)
                        for each, journal in zip(scripts, journals, strict=True)
                    )
                )
    for number, journal in enumerate(journals):
        assert [said[1] for said in journal.told] == ["", f"{number}\n/sandbox:\nbin\ntool\nwork\n\n/tmp:\n"]


async def test_without_bubblewrap_agents_with_computers_do_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["agent.function=tests.support.computer_agents:play", "agent.computer=true", f"run.directory={tmp_path}"]
    settings = load_settings(None, given, {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"agent.computer is true: (.|\n)*apt-get install"):
        async with open_solver(settings, "rollout-0"):
            pass
