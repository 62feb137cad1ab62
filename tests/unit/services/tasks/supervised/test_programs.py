"""Every program that is started as a supervised process ends when its parent does, without being killed."""

import json
import os
import sys
from pathlib import Path

import pytest

import gspo.tasks.agents
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.tasks.agents.options import worker_command
from gspo_services.tasks.supervised import BlockingProcess
from tests.support.processes.marked import left_of, outliving

AGENT = {
    "function": "tests.support.agents:act", "agents": gspo.tasks.agents.__file__, "limits": {}, "heartbeat_s": 0.1,
    "output_chars": 100,
}  # fmt: skip
PROGRAMS = {
    "reward worker": module_command("gspo_services.tasks.reward_worker", str(2**32), "60", "none", "0"),
    "reasoning-gym": module_command("gspo_services.tasks.gym.worker"),
    "agents' worker": worker_command(sys.executable, json.dumps(AGENT)),
}
FIRST = {"reasoning-gym": b'{"do": "version"}'}
"""What a program must be asked before it says its first word."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_with_the_connection_to_its_parent(name: str, tmp_path: Path) -> None:
    process = BlockingProcess(PROGRAMS[name], {**os.environ, "TMPDIR": str(tmp_path / "scratch")})
    try:
        if name in FIRST:
            process.send(FIRST[name], 60.0)
        process.receive(60.0)
        process._connection.close()
        assert process.status(60.0) is not None
        assert outliving(left_of(process._mark)) == []
    finally:
        process.close()
